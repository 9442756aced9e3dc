"""A trained model is changed, or comes out of a training that failed, and is trained again: equal to the stock Trainer's.

The reference is one process on the joined batches, as in `test_lifetimes.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import run_ranks
from tests.hf import reworked
from tests.hf.lifetimes import small_model
from tests.hf.on_ranks import Job, run_jobs
from tests.hf.reworked import CHANGES
from tests.references import shared

NEEDS_WHOLE = {("copied", 3)}
HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
HALVES = [(half, stage) for half in HALF for stage in (1, 3)]
HALVES = HALVES if FULL_GRID else HALVES[1:2]
INTERRUPTED = (1, 3)
LOOPS = [([1, 3], False), ([3, 0], True), ([3, 3], False)]
LOOPS = LOOPS if FULL_GRID else LOOPS[1:2]
AMONG_STOCK = [(0, False), (1, False), (3, False), (3, True)]
AMONG_STOCK = AMONG_STOCK if FULL_GRID else AMONG_STOCK[2:3]
CHANGED = [(change, stage, (change, stage) in NEEDS_WHOLE) for change in CHANGES for stage in (1, 3)]
FEW = (("resized", 3), ("half_frozen", 3), ("merged", 1), ("below_a_head", 1), ("fewer_layers", 3))
"""Other shapes, other weights that train, fewer modules, after adapters. Copies: `test_lifetimes.py`."""
CHANGED = CHANGED if FULL_GRID else [case for case in CHANGED if case[:2] in FEW]


def change_of(stage: int, change: str, unprepares: bool) -> Job:
    return ("tests.hf.reworked:reworked", {"stage": stage, "ranks": 2, "change": change, "unprepares": unprepares})


JOBS: dict[str, Job] = {
    **{f"{change}-{stage}": change_of(stage, change, whole) for change, stage, whole in CHANGED},
    **{
        f"interrupted-{stage}": ("tests.hf.reworked:interrupted", {"stage": stage, "ranks": 2})
        for stage in INTERRUPTED
        if FULL_GRID
    },
    **{
        f"{half}-{stage}": (
            "tests.hf.reworked:precisions",
            {"stage": stage, "ranks": 2, "config": HALF[half], "start": None},
        )
        for half, stage in HALVES
    },
    **{
        f"stock-{stage}-{fresh}": ("tests.hf.reworked:among_stock_ones", {"stage": stage, "ranks": 2, "fresh": fresh})
        for stage, fresh in AMONG_STOCK
    },
    **{
        f"loops-{number}": ("tests.hf.reworked:raw_loops", {"stages": stages, "ranks": 2, "keeps": keeps})
        for number, (stages, keeps) in enumerate(LOOPS)
    },
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = run_ranks(run_jobs, 2, (list(JOBS.values()), str(tmp_path_factory.mktemp("reworked"))), timeout=300)
    return [dict(zip(JOBS, rank, strict=True)) for rank in found]


def outcome(outcomes: Any, name: str) -> Any:
    for rank in outcomes:
        assert not isinstance(rank[name], str), rank[name]
    return outcomes[0][name]


def assert_equal(ours: Any, stock: Any) -> None:
    assert (ours["logits"] - stock["logits"]).norm() <= 1e-5 * stock["logits"].norm()
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, value in stock["weights"].items():
        assert (ours["weights"][name] - value).norm() <= 1e-5 * value.norm(), name


def alone(story: str, *how: Any) -> Any:
    """What the stock Trainer, or plain torch, makes of a story in one process; once per test run."""

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return getattr(reworked, story)(Path(folder), *how)

    return shared(("reworked", story, how), run)


@pytest.mark.parametrize(("change", "stage"), [(change, stage) for change, stage, _ in CHANGED])
def test_a_changed_model_is_trained_as_by_the_stock_trainer(change: str, stage: int, outcomes: Any) -> None:
    assert_equal(outcome(outcomes, f"{change}-{stage}"), alone("reworked", None, 1, change))


@pytest.mark.parametrize(("stage", "fresh"), AMONG_STOCK)
def test_a_stock_trainer_stands_between_ours(stage: int, fresh: bool, outcomes: Any) -> None:
    ours = outcome(outcomes, f"stock-{stage}-{fresh}")
    assert_equal(ours, alone("among_stock_ones", None, 1, fresh))  # its DDP reads weights in C++


@FULL_GRID_ONLY  # every stage: `window/test_interrupted_trainer.py`
@pytest.mark.parametrize("stage", INTERRUPTED)
def test_a_model_goes_on_after_a_training_that_failed(stage: int, outcomes: Any) -> None:
    assert_equal(outcome(outcomes, f"interrupted-{stage}"), alone("interrupted", None, 1))


@pytest.mark.parametrize(("half", "stage"), HALVES)
def test_fp32_after_half_precision_begins_with_the_masters(
    half: str, stage: int, outcomes: Any, tmp_path: Path
) -> None:
    masters, rounded, last = outcome(outcomes, f"{half}-{stage}")
    start = small_model()
    assert any((weight != weight.bfloat16().float()).any() for weight in masters.values())
    assert any((weight != start.get_parameter(name)).any() for name, weight in masters.items())
    for name, weight in rounded.items():  # `model.save_pretrained` of one rank: at stage 1 it has no masters
        assert weight.dtype == masters[name].dtype == torch.float32
        torch.testing.assert_close(
            weight, masters[name], rtol=0 if stage == 3 else 1e-2, atol=0 if stage == 3 else 1e-5
        )
    expected = reworked.precisions(tmp_path, None, 1, {}, masters)[-1]
    for name, value in expected.items():
        assert (last[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("number", range(len(LOOPS)))
def test_loops_of_ones_own_follow_each_other(number: int, outcomes: Any) -> None:
    assert_equal(outcome(outcomes, f"loops-{number}"), alone("raw_loops", [None, None], 1, False))
