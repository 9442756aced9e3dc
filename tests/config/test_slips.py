"""Slips that people made in files of their own: each is an error with its line and a remedy, none goes through as a note."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_dist.config import DistConfig, format_table, load_config
from hf_dist.config.foreign_keys import INSTEAD, OWNERS, SENTENCES, TRAINING_ARGUMENTS
from hf_dist.config.support import SUPPORT
from hf_dist.config.unknown import SECTIONS, known_keys
from hf_dist.errors import ConfigError, Problem
from tests.config.test_mutations import CONFIGS, leaves, misspelled, section_of

GOOD: dict[str, Any] = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
NUM_SLIPS = 500
MIN_NAMED = 0.98


def problems(data: dict[str, Any]) -> list[Problem]:
    """Everything wrong with `data`, written as a file with one key a line; empty when it loads."""
    try:
        load_config(json.dumps(data, indent=1))
    except ConfigError as error:
        return error.problems
    return []


def messages(data: dict[str, Any]) -> list[str]:
    """The problems without their lines, each of which has a line and a remedy."""
    found = problems(data)
    assert all(re.fullmatch(r"JSON text:\d+", problem.file) and problem.fix for problem in found), found
    return [str(problem).removeprefix(f"{problem.file}: ") for problem in found]


LOST = "is not a key at the top level."
TOP_LEVEL = {
    "zero_optimizer": ({"stage": 2}, f'{LOST} Did you mean "zero_optimization"? It is there already: remove this one.'),
    "lr_scheduler": ({"type": "WarmupLR"}, f'{LOST} Rename it to "scheduler".'),
    "activation_checkpoint": ({"cpu_checkpointing": True}, f'{LOST} Rename it to "activation_checkpointing".'),
    "activation_checkpoints": (
        True,
        f'{LOST} Did you mean "activation_checkpointing": {{"every_n_layers": 1}}?',
    ),
    "cpu_checkpoint": (True, f'{LOST} Did you mean "activation_checkpointing.cpu_checkpointing"?'),
    "grad_clipping": (1.0, f'{LOST} Did you mean "gradient_clipping"?'),
    "clip_grad": (1.0, f'{LOST} Did you mean "gradient_clipping"?'),
    "gradient_clip": (1.0, f'{LOST} Did you mean "gradient_clipping"?'),
    "max_grad_norm": (1.0, f'{LOST} Rename it to "gradient_clipping".'),
    "grad_accum_steps": (4, f'{LOST} Did you mean "gradient_accumulation_steps"?'),
    "accumulation_steps": (4, f'{LOST} Rename it to "gradient_accumulation_steps".'),
    "micro_batch_size_per_gpu": (4, f'{LOST} Rename it to "train_micro_batch_size_per_gpu".'),
    "train_micro_batch_size": (4, f'{LOST} Rename it to "train_micro_batch_size_per_gpu".'),
    "per_device_train_batch_size": (4, f'{LOST} Rename it to "train_micro_batch_size_per_gpu".'),
    "gradient_checkpointing": (
        True,
        f'{LOST} Remove it and write "activation_checkpointing": {{"every_n_layers": 1}}, or pass --gradient_checkpointing.',
    ),
    "optimizer_offload": ({"device": "cpu"}, f'{LOST} Did you mean "zero_optimization.offload_optimizer"?'),
    "offload_optimizer": (
        {"device": "cpu"},
        "does not belong at the top level, where DeepSpeed ignores it. "
        'Move it to "zero_optimization.offload_optimizer".',
    ),
    "bf16_enabled": (True, f'{LOST} Did you mean "bf16.enabled"? It is there already: remove this one.'),
    "overlap_communication": (True, f'{LOST} Did you mean "zero_optimization.overlap_comm"?'),
    "stage3_gather_16bit_weights": (
        True,
        f'{LOST} Did you mean "zero_optimization.stage3_gather_16bit_weights_on_model_save"?',
    ),
    "learning_rate": (
        1e-4,
        f'{LOST} Remove it and write "optimizer": {{"type": "AdamW", "params": {{"lr": 0.0001}}}}, or pass it to the script.',
    ),
    "mixed_precision": (
        "bf16",
        f'{LOST} Remove it and write "bf16": {{"enabled": true}} or "fp16": {{"enabled": true}}.',
    ),
    "logging_steps": (
        10,
        "is an argument of the script, not a key at the top level. Remove it and pass --logging_steps.",
    ),
    "save_step": (
        10,
        'is not a key at the top level; "save_steps" is an argument of the script. Remove it and pass --save_steps.',
    ),
    "num_processes": (8, "is a setting of accelerate, not a key at the top level. Remove it."),
    "fsdp_transformer_layer_cls_to_wrap": ("Block", "is a setting of FSDP, not a key at the top level. Remove it."),
    "zero_stage": (3, f'{LOST} Remove it: "zero_optimization.stage" is there already.'),
    "bffloat16": ({"enabled": True}, f'{LOST} Did you mean "bf16"? It is there already: remove this one.'),
    "tensorboa": ({"enabled": True}, f'{LOST} Did you mean "tensorboard"?'),
    "enabled": (
        True,
        "does not belong at the top level, where DeepSpeed ignores it. "
        "Move it into the section that it is meant for, or remove it.",
    ),
}


@pytest.mark.parametrize("key", TOP_LEVEL)
def test_a_name_that_resembles_a_real_one_never_passes_as_a_note(key: str) -> None:
    value, expected = TOP_LEVEL[key]
    assert messages({**GOOD, key: value}) == [f"{key}: {expected}"]


INSIDE = {
    "zero_optimization.optimizer_offload": ({"device": "cpu"}, 'Did you mean "offload_optimizer"?'),
    "zero_optimization.gather_16bit_weights": (True, 'Did you mean "gather_16bit_weights_on_model_save"?'),
    "zero_optimization.hpz_partition_size": (2, 'Did you mean "zero_hpz_partition_size"?'),
    "zero_optimization.gradient_clip": (1.0, 'Did you mean the top-level key "gradient_clipping"?'),
    "zero_optimization.per_device_train_batch_size": (
        1,
        'Move it to the top level, as "train_micro_batch_size_per_gpu".',
    ),
    "zero_optimization.zero_optimization": ({"stage": 2}, 'Remove it: "zero_optimization" is there already.'),
    "aio.blocksize": (1, 'Did you mean "block_size"?'),
    "activation_checkpointing.gradient_checkpointing": (
        True,
        'Remove it and write "activation_checkpointing": {"every_n_layers": 1}, or pass --gradient_checkpointing.',
    ),
    "activation_checkpointing.partitioned_activation": (True, 'Did you mean "partition_activations"?'),
    "checkpoint.load_universall": (True, 'Did you mean "load_universal"?'),
    "pipeline.pipeline_parallel_size": (2, 'Rename it to "stages".'),
    "flops_profiler.profile_steps": (1, 'Did you mean "profile_step"?'),
}


@pytest.mark.parametrize("path", INSIDE)
def test_inside_of_a_section_too(path: str) -> None:
    value, fix = INSIDE[path]
    data = copy.deepcopy(GOOD)
    section, _, key = path.partition(".")
    data.setdefault(section, {})[key] = value
    (message,) = messages(data)
    assert message.startswith(f"{path}: ") and message.endswith(fix)


VALUES = {
    "offload_optimizer": [
        ("cpu", '"offload_optimizer": {"device": "cpu"}'),
        (True, '"offload_optimizer": {"device": "cpu"}'),
        (False, '"offload_optimizer": {"device": "none"}'),
        ("nvme", '"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}'),
    ],
    "fp16": [(True, '"fp16": {"enabled": true}'), ("auto", '"fp16": {"enabled": "auto"}')],
    "zero_optimization": [(3, '"zero_optimization": {"stage": 3}')],
    "optimizer": [("Adam", '"optimizer": {"type": "Adam"}')],
    "activation_checkpointing": [(True, '"activation_checkpointing": {"every_n_layers": 1}')],
    "pipeline": [(2, '"pipeline": {"stages": 2}')],
}


@pytest.mark.parametrize(("key", "value", "example"), [(key, *case) for key, cases in VALUES.items() for case in cases])
def test_a_value_where_a_section_belongs_is_shown_as_the_section(key: str, value: Any, example: str) -> None:
    data: dict[str, Any] = {"zero_optimization": {"stage": 3, key: value}} if "offload" in key else {key: value}
    (message,) = messages(data)
    assert message.endswith(f"is not an object. Write {example}.")


def test_an_argument_under_the_name_of_the_script_leads_to_that_of_the_class() -> None:
    for key, meant in (("learning_rate", "lr"), ("adam_epsilon", "eps"), ("adam_betas", "betas")):
        (message,) = messages({"optimizer": {"type": "AdamW", "params": {key: 1e-4}}})
        assert message == f'optimizer.params.{key}: is not a parameter of AdamW. Did you mean "{meant}"?'


def test_weights_offloaded_below_stage_3_lead_to_the_section_of_the_optimizer() -> None:
    (note,) = load_config({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}).notes
    assert note.reason == 'read at stage 3 only; did you mean "offload_optimizer"?'


@pytest.mark.parametrize("text", ["", "\n\n", "  \n// nothing yet\n"])
def test_an_empty_file_is_named_with_its_first_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "ds.json")
    (problem,) = caught.value.problems
    assert problem.file.endswith("ds.json:1") and "is empty" in problem.expected and problem.fix


def test_a_path_is_not_filled_by_anybody() -> None:
    data = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}}
    (message,) = messages(data)
    assert message.startswith('zero_optimization.offload_param.nvme_path: "auto" has no source to be filled from')


def test_batch_sizes_that_fit_on_no_number_of_ranks() -> None:
    assert messages({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 280}) == [
        "train_batch_size: 100 is not a multiple of train_micro_batch_size_per_gpu (280). "
        "Set it to 280 or another multiple of 280, or remove the key."
    ]
    (message,) = messages(
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    )
    assert "Set it to 96 or another multiple of 12" in message
    assert not problems({"train_batch_size": 96, "train_micro_batch_size_per_gpu": "auto"})


def test_a_warm_up_longer_than_the_schedule() -> None:
    params = {"warmup_num_steps": 2000, "total_num_steps": 1000}
    assert messages({"scheduler": {"type": "WarmupDecayLR", "params": params}}) == [
        'scheduler.params.warmup_num_steps: 2000 is longer than the whole schedule, "total_num_steps" 1000. '
        'Set it to 1000 or less, or "total_num_steps" to "auto".'
    ]


@pytest.mark.parametrize("name", ["deepspeed", "ds_config", "my_settings"])
def test_a_whole_file_inside_of_a_key_is_read_as_the_file_and_refused(name: str) -> None:
    assert messages({name: {"zero_optimization": {"stge": 3}, "fp16": {"enabled": "maybe"}}}) == [
        f"{name}: holds a whole configuration, which is read at the top level only. Move its keys to the top level.",
        f'{name}.zero_optimization.stge: is not a key in "zero_optimization". Did you mean "stage"?',
        f'{name}.fp16.enabled: "maybe" is not true or false. Write one, or remove the key.',
    ]


def test_older_spellings_of_deepspeed_are_read() -> None:
    assert load_config({"communication_data_type": "bfp16"}).communication_data_type == "bf16"
    assert load_config({"compile": {"disable": False}}).compile.enabled
    assert not load_config({"compile": {"disable": True}}).compile.enabled


def test_a_folder_that_all_ranks_must_see_is_said() -> None:
    (note,) = load_config({"checkpoint": {"use_node_local_storage": True}}).notes
    assert (note.path, note.reason) == (
        "checkpoint.use_node_local_storage",
        "all ranks write to one folder, which must be shared",
    )


def test_what_belongs_to_other_programs_stays_a_note() -> None:
    foreign = {
        **{"_comment": 1, "trainer": {"device": "cuda"}, "hidden-size": 64, "weight-decay": 0.1, "num-layers": 2},
        **{"model": "x", "dataset": "a", "tokenizer": {}, "cuda_visible_devices": "0", "comms_config": {}, "norm": 1},
        **{"monitor_config": {}, "autotuning_config": "x", "checkpoint_dir": "x", "deepspeed_port": 1, "type": "y"},
        **{"hidden_size": 64, "train_data": "x", "deepspeed": True, "launcher": "pdsh", "warmup": 0.1},
    }
    notes = load_config({**GOOD, **foreign}).notes
    assert {note.path for note in notes} == set(foreign)
    assert {note.kind for note in notes} == {"idle", "comment"}


def test_strict_false_turns_unknown_keys_into_warnings_and_nothing_else() -> None:
    data = {**GOOD, "hf_dist": {"strict": False}, "grad_clipping": 1.0, "trainer": {}}
    config = load_config(data)
    (warning,) = [note for note in config.notes if note.kind == "unknown"]
    assert warning.path == "grad_clipping" and 'Did you mean "gradient_clipping"?' in warning.reason
    assert "grad_clipping: is not a key at the top level" in format_table(config)
    assert messages({**data, "gradient_clipping": "x"})
    assert messages({**GOOD, "grad_clipping": 1.0, "hf_dist": {"strict": "true"}})


def test_the_arguments_known_by_name_are_those_of_transformers() -> None:
    assert set(transformers.TrainingArguments.__dataclass_fields__) == TRAINING_ARGUMENTS


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    assert set(INSTEAD.values()) <= set(SUPPORT) | SECTIONS
    assert not (set(INSTEAD) | set(SENTENCES)) & known_keys("")


# ---- random slips


def abbreviated(key: str, draw: random.Random) -> str:
    """`key` with a word left out, cut short or moved: what people remember of it."""
    words = key.split("_")
    how = draw.choice(("cut", "swap", "plural", "join"))
    at = draw.randrange(len(words))
    if how == "cut" and len(words[at]) > 5:
        words[at] = words[at][: draw.randint(4, len(words[at]) - 1)]
    elif how == "swap" and len(words) > 1:
        words.append(words.pop(at))
    elif how == "plural":
        words[-1] = words[-1].removesuffix("s") if words[-1].endswith("s") else words[-1] + "s"
    elif how == "join" and len(words) > 1:
        return key.replace("_", "", 1)
    return "_".join(words)


def slipped(config: dict[str, Any], draw: random.Random) -> str | None:
    """Put one slip into `config`: what was done to it, None where there was none to make."""
    path = draw.choice(list(leaves(config)))
    path = path[: draw.randint(1, len(path))]
    section, key = ".".join(path[:-1]), path[-1]
    home = section_of(config, path)
    how = draw.choice(("misspelled", "abbreviated", "elsewhere", "lifted"))
    if how == "elsewhere":
        slip = draw.choice(sorted({*INSTEAD, *SENTENCES, *OWNERS} - {"project", "debug", "deepspeed", "dtype"}))
        if slip in known_keys(section) or section.endswith("params"):
            return None
        home[slip] = draw.choice((1, True, "x"))
        return f"{section or 'top'}: {slip}"
    if how == "lifted":
        if not section or key in ("type", "device", "params", "momentum") or key in known_keys(""):
            return None
        config[key] = home.pop(key)
        return f"{'.'.join(path)} at the top level"
    slip = misspelled(key, draw) if how == "misspelled" else abbreviated(key, draw)
    if slip == key or slip in home or slip in known_keys(section):
        return None
    home[slip] = home.pop(key)
    return f"{'.'.join(path)} -> {slip}"


def test_of_500_random_slips_nearly_all_are_named_with_line_and_remedy() -> None:
    draw, missed, done = random.Random(27), [], 0
    while done < NUM_SLIPS:
        config = copy.deepcopy(draw.choice(CONFIGS))
        what = slipped(config, draw)
        if what is None:
            continue
        done += 1
        found = problems(config)
        if not any(problem.fix and re.search(r":\d+$", problem.file) for problem in found):
            missed.append(f"{what}: {'; '.join(map(str, found)) or 'accepted'}")
    print(len(missed), "of", NUM_SLIPS, *missed, sep="\n  ")
    assert len(missed) <= (1 - MIN_NAMED) * NUM_SLIPS, "\n".join(missed)


def test_sizes_of_shard_groups_are_held_against_the_ranks(tmp_path: Path) -> None:
    from hf_dist.config import axes_of

    def zero(**keys: int) -> DistConfig:
        return load_config({"zero_optimization": keys})

    with pytest.raises(ConfigError, match=r"mics_shard_size: 3 is not a divisor of the 8 ranks"):
        axes_of(zero(stage=3, mics_shard_size=3), 8)
    config = zero(stage=2, mics_shard_size=2)
    assert axes_of(config, 8).size("shard") == 8
    assert [note.reason for note in config.notes] == ["read at stage 3 only"]
