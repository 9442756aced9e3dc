"""What hf_dist does otherwise than DeepSpeed with the same file is said, with the key that restores it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from hf_dist.config import AutoSources, differences, format_table, load_config, resolve, resolve_without_trainer
from tests.config.remedies import put

SAME: dict[str, Any] = {
    "gradient_clipping": "auto",
    "communication_data_type": "bf16",
    "data_types": {"grad_accum_dtype": "bf16"},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
}
"""A file of which both make the same."""
TRAINER = AutoSources(
    data_world_size=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    max_grad_norm=1.0,
    learning_rate=5e-5,
    fp16=False,
    bf16=False,
)
ABSENT = object()

CASES: dict[str, tuple[dict[str, Any], str, tuple[str, Any]]] = {
    "clipping": (
        {"gradient_clipping": ABSENT},
        "gradient_clipping: not in the file, so the Trainer's max_grad_norm (1.0 by default) clips",
        ("gradient_clipping", 0.0),
    ),
    "wire": (
        {"communication_data_type": ABSENT},
        "communication_data_type: not in the file: gradients are sent in fp32 (twice the bytes); DeepSpeed sends them in bf16",
        ("communication_data_type", "bf16"),
    ),
    "accumulation": (
        {"data_types.grad_accum_dtype": ABSENT},
        "data_types.grad_accum_dtype: not in the file: gradients of microbatches are summed in fp32",
        ("data_types.grad_accum_dtype", "bf16"),
    ),
    "cpu_checkpointing": (
        {"activation_checkpointing.cpu_checkpointing": True},
        "activation_checkpointing.cpu_checkpointing: turns checkpointing on",
        ("activation_checkpointing.cpu_checkpointing", False),
    ),
    "overlap": (
        {"zero_optimization.overlap_comm": ABSENT},
        "zero_optimization.overlap_comm: not in the file: reductions overlap backward on GPUs",
        ("zero_optimization.overlap_comm", False),
    ),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """`SAME` with values put at paths, or taken away."""
    data = copy.deepcopy(SAME)
    for path, value in changes.items():
        if value is ABSENT:
            *sections, key = path.split(".")
            home = data
            for part in sections:
                home = home[part]
            del home[key]
        else:
            put(data, path, value)
    return data


def lines(data: dict[str, Any]) -> list[str]:
    return [str(each) for each in differences(load_config(data))]


def test_a_file_that_means_the_same_has_no_such_section() -> None:
    assert lines(SAME) == []
    assert "Differs from DeepSpeed" not in format_table(load_config(SAME))


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_said_with_the_key_that_ends_it(name: str) -> None:
    changes, words, (path, value) = CASES[name]
    data = changed(changes)
    (line,) = lines(data)
    assert line.startswith(words) and ". As there: " in line
    table = format_table(resolve(load_config(data), TRAINER))
    assert "Differs from DeepSpeed:\n  " in table and path in table.split("Differs from DeepSpeed:")[1]
    put(data, path, value)
    assert lines(data) == []


def test_the_clip_of_the_trainer_is_said_with_its_number_and_not_where_there_is_none() -> None:
    data = changed({"gradient_clipping": ABSENT})
    (found,) = differences(resolve(load_config(data), replace(TRAINER, max_grad_norm=0.5)))
    assert "max_grad_norm, 0.5, clips" in found.text
    assert not differences(resolve(load_config(data), replace(TRAINER, max_grad_norm=0.0)))
    (found,) = differences(resolve_without_trainer(load_config({**data, "train_micro_batch_size_per_gpu": 1})))
    assert found.path == "gradient_clipping" and "nothing clips" in found.text


def test_half_precision_that_nobody_has_filled_is_not_called_by_name() -> None:
    data = changed({"bf16.enabled": "auto", "communication_data_type": ABSENT})
    (line,) = lines(data)
    assert "with half precision gradients are sent in fp32" in line
    assert not differences(resolve(load_config(data), TRAINER))


def test_under_autocast_gradients_travel_in_fp32() -> None:
    data = {"gradient_clipping": 0.0, "torch_autocast": {"enabled": True}}
    (line,) = lines(data)
    assert line.startswith("communication_data_type: not in the file: under autocast")
    assert lines({**data, "communication_data_type": "bf16"}) == []


def test_gradients_add_up_in_bf16_as_there_where_masters_are_in_bf16() -> None:
    zero = {"stage": 1, "overlap_comm": False}
    data = {"gradient_clipping": 0.0, "communication_data_type": "bf16", "zero_optimization": zero}
    half = {"enabled": True}
    (line,) = lines({**data, "bf16": half})
    assert line.startswith("data_types.grad_accum_dtype")
    assert lines({**data, "bf16": {**half, "bf16_master_weights_and_grads": True}}) == []


def test_the_key_of_gpt_neox_is_read_and_alone_it_differs() -> None:
    data = {"gradient_clipping": 0.0, "communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp16"}}
    alone = {**data, "fp16": {"fp16": True}}
    assert load_config(alone).fp16.enabled is True
    (line,) = lines(alone)
    assert line.startswith("fp16.fp16: a key of GPT-NeoX") and line.endswith("As there: remove it")
    both = {**data, "fp16": {"fp16": True, "enabled": True}}
    assert load_config(both).fp16.enabled is True and lines(both) == []
