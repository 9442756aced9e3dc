""" "auto", TrainingArguments and the two phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_dist.config import (
    AutoSources,
    DistConfig,
    axes_of,
    hidden_size_of,
    load_config,
    resolve,
    resolve_without_trainer,
)
from hf_dist.config.auto import AUTO_TABLE
from hf_dist.config.rows import Status
from hf_dist.config.support import SUPPORT
from hf_dist.errors import ConfigError

EARLY = AutoSources(
    data_world_size=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    learning_rate=5e-5,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-7,
    weight_decay=0.1,
    fp16=False,
    bf16=True,
)
LATE = replace(EARLY, hidden_size=64, num_training_steps=100, warmup_steps=10)
ALL_AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "Auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "allgather_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
SECOND_PHASE = {
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.allgather_bucket_size",
}


def open_keys(config: DistConfig) -> set[str]:
    return {path for path in config.sources if config.value_at(path) == "auto"}


def problems(config: DistConfig, sources: AutoSources, final: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(config, sources, final=final)
    return [str(problem) for problem in caught.value.problems]


def test_the_first_phase_fills_what_the_arguments_know() -> None:
    loaded = load_config(ALL_AUTO)
    assert loaded.train_batch_size == "auto" and loaded.bf16.enabled == "auto"
    config = resolve(loaded, EARLY)
    assert open_keys(config) == SECOND_PHASE
    assert config.train_batch_size == 64 and config.train_micro_batch_size_per_gpu == 8
    assert config.gradient_clipping == 0.5 and config.dtype == "bf16"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 5e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    assert config.source_of("optimizer.params.lr") == "auto <- TrainingArguments.learning_rate"
    assert config.source_of("train_batch_size") == "auto <- micro batch x accumulation x data ranks"
    assert loaded.train_batch_size == "auto"


@pytest.mark.parametrize("phases", [1, 2])
def test_after_the_second_phase_nothing_is_auto(phases: int) -> None:
    loaded = load_config(ALL_AUTO)
    config = resolve(resolve(loaded, EARLY) if phases == 2 else loaded, LATE, final=True)
    zero = config.zero_optimization
    assert open_keys(config) == set()
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (4096, 3686)
    assert (zero.allgather_bucket_size, zero.overlap_comm) == (500_000_000, True)
    idle = {note.path.rpartition(".")[2] for note in config.notes if note.kind == "idle"}
    assert idle == {"stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"}
    assert config.scheduler is not None
    assert config.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
    }
    assert config.source_of("zero_optimization.reduce_bucket_size") == "auto <- hidden_size ** 2"
    assert config.source_of("zero_optimization.allgather_bucket_size") == "auto <- default"


def test_a_model_without_a_width_gets_default_buckets() -> None:
    config = resolve(load_config(ALL_AUTO), replace(LATE, hidden_size=None), final=True)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000


def test_stage_three_sizes_are_defaults_at_other_stages() -> None:
    source = {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}
    zero = resolve(load_config(source), LATE, final=True).zero_optimization
    assert (zero.stage3_prefetch_bucket_size, zero.overlap_comm) == (50_000_000, False)


@pytest.mark.parametrize("given", [None, "auto", True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_cpus_keep_whole_sequences_between_cut_layers_unless_told(on_gpu: bool, given: Any) -> None:
    written = {} if given is None else {"hf_dist": {"sequence_regions": given}}
    loaded = load_config({"tensor_parallel": {"autotp_size": 2}, **written})
    trainer = resolve(loaded, replace(LATE, on_gpu=on_gpu), final=True)
    for config in (trainer, resolve_without_trainer(loaded, on_gpu=on_gpu)):
        where_it_verifies = given == "auto" or (given is None and on_gpu)
        assert config.hf_dist.sequence_regions is (None if where_it_verifies else bool(given))


def test_under_a_pipeline_the_message_says_how_many_data_ranks_there_are() -> None:
    loaded = load_config({"train_batch_size": 128, "pipeline": {"stages": 2}})
    assert axes_of(loaded, 8).size("data") == 4
    words = "x data ranks (4) = 64"
    ranks = "; 8 processes in 2 stages are 4 data ranks. "
    with pytest.raises(ConfigError) as caught:
        resolve(loaded, EARLY)
    assert words in str(caught.value) and ranks in str(caught.value)
    file = {"train_batch_size": 72, "train_micro_batch_size_per_gpu": 8, "pipeline": {"stages": 2}}
    with pytest.raises(ConfigError) as caught:
        resolve_without_trainer(load_config(file), data_ranks=4)
    assert "data ranks (4)" in str(caught.value) and ranks in str(caught.value)


def test_absent_keys_come_from_the_arguments_with_a_source() -> None:
    config = resolve(load_config({}), EARLY)
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.gradient_clipping) == (64, 2, 0.5)
    assert config.bf16.enabled is True
    assert config.source_of("gradient_clipping") == "absent <- TrainingArguments.max_grad_norm"
    assert config.source_of("bf16.enabled") == "absent <- TrainingArguments.bf16"


def test_new_arguments_replace_values_that_were_filled() -> None:
    first = resolve(load_config(ALL_AUTO), EARLY)
    again = resolve(first, replace(EARLY, learning_rate=1.0, per_device_train_batch_size=1))
    assert again.value_at("optimizer.params.lr") == 1.0
    assert (again.train_batch_size, again.train_micro_batch_size_per_gpu) == (8, 1)


def test_every_disagreement_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("""{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-4",
                "betas": [0.8, 0.95]}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1, "warmup_num_steps": 7}}
}""")
    assert problems(load_config(path), LATE, final=True) == [
        f"{path}:2: train_micro_batch_size_per_gpu: 4 differs from TrainingArguments.per_device_train_batch_size = 8. "
        'Set it to "auto" on line 2, or pass --per_device_train_batch_size 4.',
        f"{path}:3: gradient_clipping: 1.0 differs from TrainingArguments.max_grad_norm = 0.5. "
        'Set it to "auto" on line 3, or pass --max_grad_norm 1.0.',
        f"{path}:4: optimizer.params.lr: 0.0001 differs from TrainingArguments.learning_rate = 5e-05. "
        'Set it to "auto" on line 4, or pass --learning_rate 0.0001.',
        f"{path}:5: optimizer.params.betas: [0.8, 0.95] differs from TrainingArguments.adam_beta1, adam_beta2 = "
        '[0.9, 0.95]. Set it to "auto" on line 5, or pass --adam_beta1 0.8 --adam_beta2 0.95.',
        f"{path}:6: scheduler.params.warmup_max_lr: 1.0 differs from TrainingArguments.learning_rate = 5e-05. "
        'Set it to "auto" on line 6, or pass --learning_rate 1.0.',
        f"{path}:6: scheduler.params.warmup_num_steps: 7 differs from TrainingArguments.warmup_steps = 10. "
        'Set it to "auto" on line 6, or pass --warmup_steps 7.',
    ]


def test_a_train_batch_that_does_not_fit_names_all_numbers_and_their_origin() -> None:
    text = '{\n"train_batch_size": 30}'
    assert problems(load_config(text), EARLY) == [
        "JSON text:2: train_batch_size: 30 is not train_micro_batch_size_per_gpu (8) x gradient_accumulation_steps (2) "
        "x data ranks (4) = 64; train_micro_batch_size_per_gpu comes from --per_device_train_batch_size, "
        "gradient_accumulation_steps comes from --gradient_accumulation_steps. "
        "Delete line 2: the product is what is used then. Or: Set train_batch_size to 64."
    ]


def test_equal_values_in_both_places_are_fine() -> None:
    source = {"train_batch_size": 64, "gradient_clipping": 0.5, "gradient_accumulation_steps": "2"}
    assert resolve(load_config(source), EARLY).train_batch_size == 64


def test_finding_the_batch_size_by_trial_overrules_the_file() -> None:
    source = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
    trial = replace(EARLY, auto_find_batch_size=True, per_device_train_batch_size=2)
    assert resolve(load_config(source), trial).train_batch_size == 16


def test_no_warm_up_and_one_step_of_warm_up_are_the_same() -> None:
    source = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    resolve(load_config(source), replace(LATE, warmup_steps=1), final=True)


@pytest.mark.parametrize(
    ("source", "arguments", "dtype"),
    [
        ({}, "", "fp32"),
        ({}, "fp16", "fp16"),
        ({"bf16": {"enabled": True}}, "", "bf16"),
        ({"fp16": {"enabled": True}}, "", "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"fp16": {"loss_scale": 0}}, "bf16", "bf16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, "bf16", "bf16"),
    ],
)
def test_the_file_alone_may_turn_on_a_precision(source: dict[str, Any], arguments: str, dtype: str) -> None:
    sources = replace(EARLY, fp16=arguments == "fp16", bf16=arguments == "bf16")
    assert resolve(load_config(source), sources).dtype == dtype


def test_file_and_arguments_may_not_ask_for_different_precisions() -> None:
    assert problems(load_config({"fp16": {"enabled": True}}), EARLY) == [
        "fp16.enabled: true contradicts bf16, which is turned on by TrainingArguments.bf16. "
        "Set it to false, or do not pass --bf16."
    ]
    assert problems(load_config({"bf16": {"enabled": False}}), EARLY) == [
        "bf16.enabled: false differs from TrainingArguments.bf16, which is true. "
        'Set it to "auto", or do not pass --bf16.'
    ]


def test_a_precision_of_the_launcher_is_named_as_such() -> None:
    sources = replace(EARLY, bf16=False, launcher_precision="bf16")
    assert resolve(load_config({}), sources).source_of("bf16.enabled") == "absent <- mixed_precision of accelerate"
    assert problems(load_config({"fp16": {"enabled": True}}), sources) == [
        "fp16.enabled: true contradicts bf16, which is turned on by mixed_precision of accelerate. "
        "Set it to false, or set that to no."
    ]
    assert problems(load_config({"bf16": {"enabled": False}}), sources) == [
        "bf16.enabled: false differs from mixed_precision of accelerate, which is true. "
        'Set it to "auto", or set that to no.'
    ]


def test_param_dtype_must_be_the_precision() -> None:
    assert problems(load_config({"data_types": {"param_dtype": "fp32"}}), LATE, final=True) == [
        'data_types.param_dtype: "fp32" differs from the precision of the weights, which is bf16. '
        "Remove it, or enable that precision."
    ]


def test_auto_where_nobody_knows_is_a_problem_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r'fp16.loss_scale: "auto" has no source to be filled from'):
        load_config({"fp16": {"loss_scale": "auto"}})
    with pytest.raises(ConfigError, match=r'optimizer.params.momentum: "auto" has no source'):
        load_config({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}})
    source = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}}
    assert problems(load_config(source), EARLY, final=True) == [
        'scheduler.params.total_num_steps: "auto" has no source to be filled from. '
        'Write a value, or remove the key; "auto" has no source here.'
    ]


def test_a_schedule_in_the_file_that_overrules_the_command_line_is_noted() -> None:
    source = {"scheduler": {"type": "WarmupLR", "params": {}}}
    config = resolve(load_config(source), replace(EARLY, lr_scheduler_type="cosine"))
    assert [(note.path, note.reason) for note in config.notes] == [
        ("--lr_scheduler_type cosine", '"scheduler" in the config decides: WarmupLR')
    ]


def test_without_a_trainer_the_micro_batch_may_stay_open() -> None:
    config = resolve_without_trainer(
        load_config({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}), data_ranks=2
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (None, None)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (1, 0.0)
    assert config.source_of("gradient_clipping") == "absent <- default"


def test_without_a_trainer_the_triangle_is_solved() -> None:
    source = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0}
    config = resolve_without_trainer(load_config(source), data_ranks=2)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (4, 0.0)
    with pytest.raises(ConfigError, match="is not a multiple of 12"):
        resolve_without_trainer(load_config(source), data_ranks=3)


def test_without_a_trainer_every_open_auto_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_without_trainer(load_config(ALL_AUTO))
    assert [problem.path for problem in caught.value.problems] == [
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    ]
    assert caught.value.problems[0].fix == 'Write a value: without a Trainer nothing fills "auto" here.'


def test_without_a_trainer_what_is_known_is_filled() -> None:
    source = {
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto"},
        },
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    config = resolve_without_trainer(load_config(source), hidden_size=10, num_training_steps=7)
    assert config.dtype == "bf16" and config.zero_optimization.reduce_bucket_size == 100
    assert config.value_at("scheduler.params") == {"total_num_steps": 7, "warmup_max_lr": 0.1, "warmup_min_lr": 0.0}


def test_every_rule_fills_a_key_that_exists_from_a_source_that_exists() -> None:
    for rule in AUTO_TABLE:
        assert SUPPORT[rule.path].status in (Status.USED, Status.NO_EFFECT)
        assert hasattr(AutoSources(), rule.source)
        assert bool(rule.option) or not rule.must_match


def test_sources_are_read_from_any_object_like_training_arguments() -> None:
    args = SimpleNamespace(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=None,
        learning_rate=5e-5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        fp16=False,
        bf16=False,
        bf16_full_eval=True,
        lr_scheduler_type=SimpleNamespace(value="cosine"),
        get_warmup_steps=lambda n: n // 200,
    )
    sources = AutoSources.from_training_arguments(args, data_world_size=4, num_training_steps=100, hidden_size=64)
    expected = replace(LATE, max_grad_norm=0.0, warmup_steps=1, lr_scheduler_type="cosine", only_loss_is_read=True)
    assert sources == expected
    assert AutoSources.from_training_arguments(args, data_world_size=4).warmup_steps is None


def test_the_width_of_a_model_is_found_where_its_config_has_it() -> None:
    assert hidden_size_of(SimpleNamespace(hidden_size=3)) == 3
    assert hidden_size_of(SimpleNamespace(hidden_sizes=[3, 9])) == 9
    assert hidden_size_of(SimpleNamespace(text_config=SimpleNamespace(hidden_size=5))) == 5
    assert hidden_size_of(SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=[5, 2]))) == 5
    assert hidden_size_of(SimpleNamespace()) is None
