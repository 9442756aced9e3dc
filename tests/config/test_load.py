"""Keys and values of a config: coercion, aliases, and every kind of complaint with its exact words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.config import load_config
from hf_dist.config.support import SUPPORT
from hf_dist.errors import ConfigError


def messages(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return [str(problem) for problem in caught.value.problems]


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def test_an_empty_config_has_the_documented_defaults() -> None:
    config = load_config({})
    assert (config.train_batch_size, config.gradient_clipping, config.optimizer) == (None, None, None)
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (0, 500_000_000)
    assert (config.fp16.initial_scale_power, config.fp16.hysteresis, config.bf16.check_grad_overflow) == (16, 2, True)
    assert config.shard_group_size is None and config.dtype == "fp32"


@pytest.mark.parametrize("value", [500_000_000, 5e8, "5e8", "500000000", 500000000.9])
def test_a_size_is_read_from_every_spelling(value: Any) -> None:
    config = load_config(zero(stage="3", reduce_bucket_size=value, overlap_comm="true"))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert (config.zero_optimization.stage, config.zero_optimization.overlap_comm) == (3, True)


def test_what_was_written_as_another_type_is_said() -> None:
    config = load_config(
        {
            "train_batch_size": "8",
            "gradient_accumulation_steps": 2.0,
            "fp16": {"enabled": "False"},
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "bias_correction": False}},
            "zero_optimization": {"reduce_bucket_size": 15099494.4, "allgather_bucket_size": 5e8, "overlap_comm": 1},
        }
    )
    assert [(note.path, note.reason, note.kind) for note in config.notes] == [
        ("optimizer.params.lr", '"1e-4" is read as 0.0001', "read"),
        ("train_batch_size", '"8" is read as 8', "read"),
        ("fp16.enabled", '"False" is read as false', "read"),
        ("zero_optimization.reduce_bucket_size", "15099494.4 is read as 15099494", "read"),
        ("zero_optimization.overlap_comm", "1 is read as true", "read"),
    ]


def test_values_are_coerced_and_names_get_their_usual_case() -> None:
    config = load_config(
        {
            "train_batch_size": "8",
            "gradient_accumulation_steps": 2.0,
            "communication_data_type": "torch.bfloat16",
            "fp16": {"enabled": "False", "min_loss_scale": 0.5},
            "optimizer": {"type": "adamw", "params": {"lr": "1e-4", "betas": ["0.9", 0.95], "foreach": True}},
            "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 0, "warmup_max_lr": "auto"}},
        }
    )
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 2)
    assert (config.communication_data_type, config.fp16.min_loss_scale) == ("bf16", 0.5)
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 1e-4, "betas": [0.9, 0.95], "foreach": True}
    assert config.scheduler.type == "WarmupLR"
    assert config.scheduler.params == {"warmup_num_steps": 0, "warmup_max_lr": "auto"}


@pytest.mark.parametrize(
    ("source", "path", "value"),
    [
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        (zero(prefetch_bucket_size=7), "zero_optimization.stage3_prefetch_bucket_size", 7),
        (zero(prefetch_bucket_size="auto"), "zero_optimization.stage3_prefetch_bucket_size", "auto"),
        (zero(stage=3, mics_shard_size=4), "shard_group_size", 4),
        (zero(stage=3, zero_hpz_partition_size=8), "zero_optimization.shard_group_size", None),
        ({"fp16": None, "zero_optimization": {"stage": None}}, "zero_optimization.stage", 0),
        (zero(leaf_module={"classes": ["Moe"]}), "zero_optimization.leaf_module.classes", ("Moe",)),
    ],
)
def test_old_and_short_spellings_reach_the_field(source: dict[str, Any], path: str, value: Any) -> None:
    assert load_config(source).value_at(path) == value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        # misspelled
        (zero(stge=1), 'zero_optimization.stge: is not a key in "zero_optimization". Did you mean "stage"?'),
        (
            {"zero_optimisation": {}},
            'zero_optimisation: is not a key at the top level. Did you mean "zero_optimization"?',
        ),
        (
            {"flops_profiler": {"enabled": True, "enable": True}},
            'flops_profiler.enable: is not a key in "flops_profiler". Did you mean "enabled"? It is there already: '
            "remove this one.",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"momentun": 1}}},
            'optimizer.params.momentun: is not a parameter of SGD. Did you mean "momentum"?',
        ),
        # in the wrong place
        (
            {"stage": 2},
            "stage: does not belong at the top level, where DeepSpeed ignores it. "
            'Move it to "zero_optimization.stage".',
        ),
        (
            {**zero(stage=2), "offload_optimizer": {"device": "cpu"}},
            "offload_optimizer: does not belong at the top level, where DeepSpeed ignores it. "
            'Move it to "zero_optimization.offload_optimizer".',
        ),
        (
            {"optimizer": {"type": "Adam", "lr": 1}},
            'optimizer.lr: does not belong in "optimizer", where DeepSpeed ignores it. Move it to "optimizer.params.lr".',
        ),
        (
            zero(gradient_clipping=1),
            'zero_optimization.gradient_clipping: does not belong in "zero_optimization". '
            'Move it to the top level, as "gradient_clipping".',
        ),
        # unknown in a strict section
        (
            {"bf16": {"colour": 1}},
            'bf16.colour: is not a key in "bf16". Remove it; the keys are auto_cast, bf16_master_weights_and_grads, '
            "bf16_optimizer_states, check_grad_overflow, enabled, hysteresis, immediate_grad_update, "
            "initial_scale_power, loss_scale, loss_scale_window, min_loss_scale.",
        ),
        # values
        (zero(stage=4), "zero_optimization.stage: 4 is not one of 0, 1, 2, 3. Write one."),
        (
            zero(stage="auto"),
            'zero_optimization.stage: "auto" has no source to be filled from: neither TrainingArguments nor the model '
            "decides this key. Write a value, or remove the key to get the default.",
        ),
        (
            {"train_batch_size": 2.5},
            "train_batch_size: 2.5 is not a whole number of at least 1. Write one, or remove the key.",
        ),
        (
            {"gradient_accumulation_steps": 0},
            "gradient_accumulation_steps: 0 is not a whole number of at least 1. Write one, or remove the key.",
        ),
        (
            {"gradient_clipping": float("inf")},
            "gradient_clipping: Infinity is not a number of at least 0. Write one, or remove the key.",
        ),
        (
            zero(overlap_comm="yes"),
            'zero_optimization.overlap_comm: "yes" is not true or false. Write one, or remove the key.',
        ),
        (
            {"communication_data_type": "fb16"},
            'communication_data_type: "fb16" is not one of fp16, bf16, fp32. Did you mean "bf16"?',
        ),
        ({"fp16": True}, 'fp16: true is not an object. Write "fp16": {"enabled": true}.'),
        (
            {"optimizer": {"params": {}}},
            "optimizer.type: is missing. Add it (for example AdamW), or remove the section.",
        ),
        (
            {"optimizer": {"type": "AdmaW"}},
            'optimizer.type: "AdmaW" is not a known optimizer. Did you mean "AdamW"?',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "optimizer.params.betas: [0.9] is not a list of two numbers. Write one, or remove the key.",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: 1.0 is not a parameter of the optimizer. "
            'Move it to the top level, as "gradient_clipping".',
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
            'scheduler.params.total_num_steps: is missing; WarmupDecayLR needs it. Add "total_num_steps": "auto".',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_stps": 1}}},
            'scheduler.params.warmup_num_stps: is not a parameter of WarmupLR. Did you mean "warmup_num_steps"?',
        ),
        # contradictions
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            'bf16.enabled: true contradicts "fp16.enabled", which is true too. Set one of them to false.',
        ),
        (
            zero(stage=3, mics_shard_size=2, zero_hpz_partition_size=4),
            'zero_optimization.zero_hpz_partition_size: 4 contradicts "mics_shard_size" 2, which keeps all states '
            "within its groups. Keep one of the two.",
        ),
        (
            {"local_sgd": {"every": 10, "outer_momentum": 1}},
            "local_sgd.outer_momentum: 1 is not a number of at least 0 and below 1. Write one, or remove the key.",
        ),
        (
            {"local_sgd": {"every": 2, "fragments": 2, "overlap": 2}},
            'local_sgd.overlap: 2 is not below "every" 2: a fragment would start again before its mean is applied. '
            "Set it to 1 or less, or remove the key.",
        ),
        (
            zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
            'zero_optimization.prefetch_bucket_size: 1 contradicts "zero_optimization.stage3_prefetch_bucket_size", '
            'the newer name of the same key. Remove "zero_optimization.prefetch_bucket_size".',
        ),
        (
            {"fp16": {"fp16": True, "enabled": False}},
            'fp16.fp16: true contradicts "fp16.enabled", the newer name of the same key. Remove "fp16.fp16".',
        ),
        # refused
        (
            zero(stage=0, offload_optimizer={"device": "cpu", "pin_memory": True}),
            'zero_optimization.offload_optimizer.device: "cpu" needs optimizer state that is sharded: at stage 0 every rank '
            'would offload and step all of it. Set "zero_optimization.stage" to 1, 2 or 3, or the device to "none".',
        ),
        (
            zero(stage=2, cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "disk"}),
            'zero_optimization.cpu_offload: true contradicts "zero_optimization.offload_optimizer.device", the newer name of '
            'the same key. Remove "zero_optimization.cpu_offload".',
        ),
        (
            {"pipeline": {"stages": 2, "virtual_stages": 3}},
            'pipeline.virtual_stages: 3 needs "schedule": "interleaved_1f1b"; "1f1b" runs one stage per rank. '
            'Set "schedule" to "interleaved_1f1b", or remove the key.',
        ),
        (
            {**zero(stage=3), "pipeline": {"stages": 2, "schedule": "zb_h1", "reshard_per_microbatch": True}},
            'pipeline.reshard_per_microbatch: true contradicts "schedule": "zb_h1", which needs the weights of a '
            'microbatch again after its backward. Remove the key, or set "schedule" to "1f1b".',
        ),
        (
            {"tensor_parallel": {"tp": {"tp_size": 2}, "autotp_size": 4}},
            'tensor_parallel.tp.tp_size: 2 contradicts "tensor_parallel.autotp_size", the newer name of the same key. '
            'Remove "tensor_parallel.tp.tp_size".',
        ),
        (
            {"tensor_parallel": {"autotp_size": 2.5}},
            "tensor_parallel.autotp_size: 2.5 is not a whole number of at least 0. Write one, or remove the key.",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
            'torch_autocast.dtype: "torch.float16" is not available: only in bfloat16 does autocast need no loss scale. '
            'Set it to "bfloat16".',
        ),
        (
            {"gradient_allreduce_op": "sum"},
            'gradient_allreduce_op: "sum" is not available yet in this version of hf_dist. '
            "Remove the key; gradients are averaged.",
        ),
        (
            {"hf_dist": {"strict": True}, "steps_per_print": 10},
            "steps_per_print: has no effect (use logging_steps of TrainingArguments). "
            "Correct or remove it, or hf_dist.strict.",
        ),
        (
            {"strict_config": True, "train_batch_size": "8"},
            'train_batch_size: is not of the type of the key ("8" is read as 8). '
            "Correct or remove it, or hf_dist.strict.",
        ),
        (
            zero(offload_optimizer={"device": "disk"}),
            'zero_optimization.offload_optimizer.device: "disk" is not one of none, cpu, nvme. Write one, or remove the key.',
        ),
        (
            zero(stage=3, offload_param={"device": "none"}, offload_optimizer={"ratio": 1.5}),
            "zero_optimization.offload_optimizer.ratio: 1.5 is not a number of at least 0 and at most 1. "
            "Write one, or remove the key.",
        ),
        (
            {"pipeline": {"partition_method": "best", "schedule": "1f2b"}},
            'pipeline.schedule: "1f2b" is not one of gpipe, 1f1b, interleaved_1f1b, zb_h1. Did you mean "1f1b"?',
        ),
        (
            {"pipeline": {"partition_method": "type:("}},
            'pipeline.partition_method: "type:(" is not a regular expression: '
            "missing ), unterminated subpattern at position 0. Write one, or remove the key.",
        ),
        (
            {"checkpoint": {"max_shard_size": "5XB"}},
            'checkpoint.max_shard_size: "5XB" is not a size such as "5GB" (KB, MB, GB, TB) or a number of bytes. '
            "Write one, or remove the key.",
        ),
    ],
)
def test_one_wrong_setting_is_one_sentence(source: dict[str, Any], message: str) -> None:
    assert messages(source) == [message]


@pytest.mark.parametrize("name", ["MuAdam", "LBFGS"])
def test_an_optimizer_that_is_not_served_is_refused_by_name(name: str) -> None:
    first, *others = messages({"optimizer": {"type": name, "params": {"freeze_step": 3, "cuda_aware": False}}})
    assert first.startswith(f'optimizer.type: "{name}" is ') and "or another of Adam, AdamW" in first
    # Its own parameters at once, not after the type is right.
    assert [message.split(":")[0] for message in others] == [
        "optimizer.params.freeze_step",
        "optimizer.params.cuda_aware",
    ]


@pytest.mark.parametrize("name", ["SequentialLR", "LambdaLR", "ReduceLROnPlateau"])
def test_a_schedule_that_is_not_served_is_refused_by_name(name: str) -> None:
    (message,) = messages({"scheduler": {"type": name, "params": {}}})
    assert message.startswith(f'scheduler.type: "{name}" ') and "use one of WarmupLR" in message


def test_every_problem_is_reported_with_its_line_in_one_error() -> None:
    text = """{
      "train_batch_size": -1,
      "fp16": {
        "enabled": "maybe"
      },
      "zero_optimization": {
        "stage": 7,
        "offload_param": {
          "device": "nvme"
        }
      }
    }"""
    assert [message.split(" ")[:3] for message in messages(text)] == [
        ["JSON", "text:2:", "train_batch_size:"],
        ["JSON", "text:4:", "fp16.enabled:"],
        ["JSON", "text:7:", "zero_optimization.stage:"],
        ["JSON", "text:8:", "zero_optimization.offload_param.nvme_path:"],
    ]


def test_settings_that_are_off_are_accepted_without_a_word() -> None:
    off = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {"enabled": False, "version": 0.1},
        "compression_training": {"layer_reduction": {"enabled": False}},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "wall_clock_breakdown": False,
        "pipeline": {"stages": 1},
        "zero_optimization": {"offload_param": {"device": "none"}, "offload_optimizer": None, "cpu_offload": False},
        "torch_autocast": {"enabled": False},
    }
    assert load_config(off).notes == ()


def test_keys_without_effect_are_noted_once_with_the_reason() -> None:
    short = {"prefetch_bucket_size": 5, "stage3_gather_fp16_weights_on_model_save": True}
    config = load_config(
        {
            "_comment": "mine",
            "steps_per_print": 10,
            "comet": {"enabled": True, "project": "x"},
            "zero_optimization": {"_note": "x", "stage": 2, "contiguous_gradients": True, **short},
            "hidden-size": 64,
            "trainer": {"device": "cuda"},
            "fp16": {"auto_cast": True},
        }
    )
    assert [(note.path, note.reason) for note in config.notes] == [
        ("_comment", "a comment"),
        ("steps_per_print", "use logging_steps of TrainingArguments"),
        ("comet", 'use report_to="comet_ml" of TrainingArguments'),
        ("zero_optimization._note", "a comment"),
        ("zero_optimization.contiguous_gradients", "a detail of DeepSpeed's implementation"),
        ("zero_optimization.stage3_gather_fp16_weights_on_model_save", "full weights are always saved"),
        ("hidden-size", "not a key of this schema"),
        ("trainer", "not a key of this schema"),
        ("fp16.auto_cast", "floating-point inputs always follow the compute dtype"),
        ("zero_optimization.prefetch_bucket_size", "read at stage 3 only"),
    ]


@pytest.mark.parametrize(
    ("pipeline", "stage", "noted"),
    [
        (
            {"stages": 2, "schedule": "interleaved_1f1b"},
            0,
            {"pipeline.schedule": 'with "virtual_stages" 1 it is "1f1b"'},
        ),
        (
            {"stages": 2, "reshard_per_microbatch": True},
            1,
            {"pipeline.reshard_per_microbatch": "read at stages 2 and 3 only"},
        ),
        ({"stages": 1, "schedule": "zb_h1"}, 3, {"pipeline.schedule": "the model is one pipeline stage"}),
        ({"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "reshard_per_microbatch": False}, 0, {}),
        ({"stages": 2, "schedule": "zb_h1", "reshard_per_microbatch": True}, 2, {}),
    ],
)
def test_pipeline_keys_without_effect_are_noted(pipeline: dict[str, Any], stage: int, noted: dict[str, str]) -> None:
    config = load_config({"pipeline": pipeline, "zero_optimization": {"stage": stage}})
    assert {note.path: note.reason for note in config.notes} == noted


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "none", "true", "5e8", "", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["enabled", "device", "params", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SUPPORT)), VALUES, max_size=6), st.booleans())
def test_any_value_anywhere_loads_or_raises_config_error(keys: dict[str, Any], nest: bool) -> None:
    source: dict[str, Any] = {}
    for path, value in keys.items():
        node = source
        *parents, leaf = path.split(".") if nest else [path]
        for part in parents:
            child = node.setdefault(part, {})
            node = child if isinstance(child, dict) else {}
        node[leaf] = value
    try:
        load_config(source)
    except ConfigError as error:
        assert error.problems
