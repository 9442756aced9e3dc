"""In half precision the targets of a loss arrive as they were given, by whatever way, and inputs in the compute dtype."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.sharding.label_dtypes import is_target
from tests.harness import run_ranks
from tests.sharding import targets

CASES = [
    *((kind, stage, "bf16") for kind in ("regression", "multi-label", "patches", "series") for stage in (1, 3)),
    *((kind, 2, "fp16") for kind in ("regression", "multi-label", "patches")),
]


@functools.cache
def found() -> list[list[Any]]:
    return run_ranks(targets.losses, 2, (CASES,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-z{}-{}".format(*case))
def test_the_loss_is_that_of_one_process(case: tuple[str, int, str]) -> None:
    kind, _, dtype = case
    for rank, results in enumerate(found()):
        values, skipped = results[CASES.index(case)]
        (first, name), (second, _), (evaluated, _) = values
        assert name == "torch.float32"
        assert skipped == 0
        assert evaluated == pytest.approx(second, rel=1e-2)
        if kind in ("regression", "multi-label"):  # plain torch promotes the loss by itself
            half = torch.bfloat16 if dtype == "bf16" else torch.float16
            assert first == pytest.approx(targets.alone(kind, half)[rank], rel=1e-6)
        assert first == pytest.approx(targets.autocast(kind)[rank], rel=2e-2)


def test_targets_come_unchanged_by_keyword_position_and_nested() -> None:
    for way, result in run_ranks(targets.seen, 1)[0].items():
        assert result is True or result == (True, True), way


def test_stages_of_a_pipeline_and_the_trainer_hand_targets_on(tmp_path: Path) -> None:
    expected = sum(targets.alone("regression", torch.bfloat16)) / 2
    for losses in run_ranks(targets.staged, 2, ("bf16",)):
        assert losses[0] == pytest.approx(expected, rel=1e-5)
    labels = torch.tensor([1001.0 + 2 * i for i in range(8)])
    for losses in run_ranks(targets.trained, 2, (str(tmp_path),)):
        assert losses[0] == pytest.approx(float(labels.square().mean()), rel=2e-3)  # a head that answers about 0


def test_a_forward_that_was_interrupted_leaves_nothing_open() -> None:
    assert run_ranks(targets.interrupted, 1) == [(True, 0)]


def test_what_is_a_target() -> None:
    for name in ("labels", "label", "mask_labels", "label_ids", "target", "targets", "y", "y_true", "future_values"):
        assert is_target(name), name
    for name in ("pixel_values", "inputs_embeds", "input_features", "attention_mask", "x", "labelling", "yes"):
        assert not is_target(name), name
