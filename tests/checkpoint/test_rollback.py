"""A load takes the place of everything: no moment, rate, scale or gradient of what was there before survives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import rollback
from tests.covering import some_of
from tests.harness import run_ranks

DISK = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
HOST = {"offload_optimizer": {"device": "cpu"}}
FP16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}
CASES: dict[str, dict[str, Any]] = {
    **{f"adamw-z{stage}": {"stage": stage} for stage in range(4)},
    "adamw-from-step-2": {"steps": 2, "stage": 2},
    "momentum": {"optimizer": "sgd", "stage": 1},
    "momentum-from-step-2": {"optimizer": "sgd", "steps": 2, "stage": 3},
    "adagrad": {"optimizer": "adagrad", "stage": 1},
    "adagrad-disk": {"optimizer": "adagrad", "stage": 2, "offload": DISK},
    "state-of-other-shapes": {"optimizer": "history", "stage": 2},
    "state-of-other-shapes-from-step-2": {"optimizer": "history", "steps": 2, "stage": 1},
    "host": {"stage": 2, "offload": HOST},
    "disk": {"stage": 3, "offload": DISK},
    "disk-from-step-2": {"stage": 3, "steps": 2, "offload": DISK},
    "fp16": {"stage": 1, "fp16": FP16},
    "open-window-z1": {"stage": 1, "gradient_accumulation_steps": 2},
    "open-window-z3-bf16": {"stage": 3, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}},
}
# States of other shapes, a scale, an open window; Adagrad is below, every place of states in
# `memory/offload/test_checkpoints.py`.
CASES = some_of(CASES, "state-of-other-shapes-from-step-2", "fp16", "open-window-z3-bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return run_ranks(rollback.go_back, 2, (str(tmp_path_factory.mktemp("rollback")), list(CASES.values())))


@pytest.mark.parametrize("name", CASES)
def test_a_load_into_an_engine_that_has_stepped_equals_a_load_into_a_new_one(name: str, found: list[list[Any]]) -> None:
    for rank in found:
        same_facts, loaded, same_losses, after, facts = rank[list(CASES).index(name)]
        assert same_facts, facts
        assert facts[-1], "the random numbers after the save come again"
        assert loaded == []
        assert same_losses
        assert after == []


def test_a_checkpoint_of_another_optimizer_leaves_nothing_of_this_one(tmp_path: Path) -> None:
    for rank in run_ranks(rollback.without_state, 2, (str(tmp_path),)):
        assert rank == {"adamw": ([], True), "adagrad": ([], True), "scale": (True, True)}


def test_a_load_over_pipeline_stages_replaces_moments_and_generators(tmp_path: Path) -> None:
    differences, draws = zip(*run_ranks(rollback.stages, 2, (str(tmp_path),)), strict=True)
    assert differences == (0.0, 0.0)
    (first, alike), (other, same) = draws
    assert first != other and alike == same == first


def test_load_state_of_the_beginning_repeats_the_run(tmp_path: Path) -> None:
    for first, second in run_ranks(rollback.with_accelerate, 2, (str(tmp_path),)):
        assert first == second


def test_another_optimizer_keeps_its_own_options_and_groups_are_found_by_their_parameters(tmp_path: Path) -> None:
    found = run_ranks(rollback.other_optimizers, 1, (str(tmp_path),))[0]
    loaded, then, *_ = found["sgd"]
    # the schedule goes on where it was (1/4 of the base rate, then 1/5), on the base rates of this run
    own = [
        {"lr": 0.125, "initial_lr": 0.5, "weight_decay": 0, "momentum": 0.9},
        {"lr": 5e-3 / 4, "initial_lr": 5e-3, "weight_decay": 0.0, "momentum": 0.9},
    ]
    assert loaded == [pytest.approx(o) for o in own]
    assert then == pytest.approx([0.1, 1e-3])
    saved = [
        {"lr": 1e-3 / 4, "initial_lr": 1e-3, "weight_decay": 0.5, "betas": 0.9},
        {"lr": 5e-3 / 4, "initial_lr": 5e-3, "weight_decay": 0.0, "betas": 0.9},
    ]
    for name, expected in (("same", saved), ("turned", saved[::-1])):
        assert found[name][0] == [pytest.approx(o) for o in expected], name
        assert found[name][1] == pytest.approx([o["initial_lr"] / 5 for o in expected]), name
    assert "had 2 param groups, this one has 1" in found["one group"]
    assert "param group 0 holds parameters of the checkpoint's group(s) 0, 1" in found["divided"]


def test_a_trainer_resumes_an_earlier_step_of_its_own_and_keeps_another_optimizers_rate(tmp_path: Path) -> None:
    for found in run_ranks(rollback.with_trainer, 2, (str(tmp_path),)):
        assert found["again"] == found["whole"]
        other, alone = found["rates"]
        assert other == pytest.approx(alone)
        assert len(other) > 1
