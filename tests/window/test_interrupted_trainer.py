"""A Trainer that is interrupted in the middle of a window and trains again: as the stock one, layout by layout."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.on_ranks import record_of, run_jobs
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import check_equal
from tests.references import shared
from tests.window.interrupted import interrupted

PIPELINE = {"pipeline": {"stages": 2}}
CASES: list[dict[str, Any]] = [
    *({"stage": s, "config": {}, "error": e, "where": w} for s, e, w in (
        (0, "failure", "forward"), (1, "ctrl_c", "forward"), (2, "ctrl_c", "substep"),
        (3, "ctrl_c", "forward"), (3, "failure", "substep"), (3, "failure", "forward"),
    )),
    # A stage that fails inside of the schedule leaves its neighbour waiting; here the window is not under way yet.
    *({"stage": s, "config": PIPELINE, "error": e, "where": "substep"} for s, e in ((1, "ctrl_c"), (3, "failure"))),
]  # fmt: skip
# Every stage, both errors at both places, and one pipeline.
CASES = CASES if FULL_GRID else [CASES[0], *CASES[2:5], CASES[6]]


def _name(case: dict[str, Any]) -> str:
    return f"{'pp' if case['config'] else 'dp'}-stage{case['stage']}-{case['error']}-{case['where']}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the main rank found, case by case."""
    jobs = [("tests.window.interrupted:job", case) for case in CASES]
    return run_ranks(run_jobs, 2, (jobs, str(tmp_path_factory.mktemp("interrupted"))), timeout=600)[0]


def alone(data_ranks: int, error: str, where: str) -> dict[str, Any]:
    """The stock Trainer in one process."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = RECIPES["plain"].in_one_process(folder, data_ranks, max_steps=4)
            interrupted(trainer, error, where)
            return record_of(trainer)

    return shared(("stock Trainer is interrupted", data_ranks, error, where), run)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[_name(case) for case in CASES])
def test_an_interrupted_trainer_trains_again_as_the_stock_one(index: int, outcomes: list[Any]) -> None:
    case = CASES[index]
    assert not isinstance(outcomes[index], str), outcomes[index]
    check_equal(outcomes[index], alone(1 if case["config"] else 2, case["error"], case["where"]))
