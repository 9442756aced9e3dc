"""What a callback asks for on any rank, all ranks do, at the same step as the stock Trainer whose only process asks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.hf.control_jobs import FLAGS, STEPS, outcome
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.references import shared

ASKED = [(flag, "step", (1,), stage) for flag in FLAGS for stage in (0, 3)]
ASKED += [("should_save", "step", (0, 1), 1), ("should_training_stop", "evaluate", (0,), 3)]


def job(flag: str, event: str, ranks: tuple[int, ...], stage: int) -> Job:
    """The job of each rank."""
    return "tests.hf.control_jobs:outcome", {"flag": flag, "event": event, "ranks": ranks, "stage": stage}


LATE: Job = ("tests.hf.control_jobs:added_late", {})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [*(job(*asked) for asked in ASKED), LATE]}, tmp_path_factory)


def alone(flag: str, event: str) -> Any:
    """What the only process of the stock Trainer does."""

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return outcome(Path(folder), flag, event, (0,), None)

    return shared(("stock Trainer is asked", flag, event), run)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_all_ranks_do_what_any_rank_asks_for(asked: Any, outcomes: Any) -> None:
    flag, event, _, _ = asked
    expected = alone(flag, event)
    assert expected[1] < STEPS or expected[0], "the flag does something"
    for seen, steps, _ in found(outcomes, 2, job(*asked)):
        assert (seen, steps) == expected[:2]
    assert found(outcomes, 2, job(*asked))[0][2] == expected[2]


def test_a_callback_that_comes_during_the_training_of_one_rank_is_told(outcomes: Any) -> None:
    first, second = found(outcomes, 2, LATE)
    assert not any("was added during the training" in line for line in first)
    assert sum("Asks was added during the training" in line for line in second) == 1
