"""SIGTERM and SIGUSR1 at any moment: all ranks save together, leave with code 75, and started again give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import some_of
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

JOB = "tests.hf.preempted:"
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "in a window": (dict(moment=("microbatch", 8), number="SIGTERM", ranks=(1,)), 2),
    "in a window, all ranks": (dict(moment=("microbatch", 14), number="SIGUSR1", ranks=(0, 1)), 5),
    "at the end of an epoch": (dict(moment=("microbatch", 11), number="SIGTERM", ranks=(0,), eval_strategy="no"), 4),
    "in the last evaluation": (dict(moment=("prediction", 7), number="SIGTERM", ranks=(0,)), 8),
    "in an evaluation": (dict(moment=("prediction", 5), number="SIGTERM", ranks=(1,)), 6),
    "in an evaluation after an epoch": (dict(moment=("prediction", 3), number="SIGTERM", ranks=(1,)), 4),
    "while a checkpoint is written": (
        dict(moment=("save", 2), number="SIGUSR1", ranks=(0,), async_save=True, save_strategy="steps", save_steps=2),
        4,
    ),
    "while a checkpoint is written and waited for": (
        dict(
            moment=("save", 1), number="SIGUSR1", ranks=(0, 1), save_strategy="steps", save_steps=3, save_total_limit=1
        ),
        3,
    ),
    "before the first step": (dict(moment=("window", 1), number="SIGTERM", ranks=(1,)), 0),
    "in the last microbatch": (dict(moment=("microbatch", 22), number="SIGTERM", ranks=(1,), eval_strategy="no"), 8),
}
"""What happens -> how the job is told, and the step that is saved."""
CASES = some_of(CASES, "in a window", "in an evaluation after an epoch", "while a checkpoint is written")
WITHOUT_EVALUATION = (JOB + "whole", {"eval_strategy": "no"})
JOBS = [
    (JOB + "whole", {}),
    *((JOB + "told", job) for job, _ in CASES.values()),
    *([WITHOUT_EVALUATION] if any("eval_strategy" in job for job, _ in CASES.values()) else []),
    (JOB + "given_back", {}),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """`outcomes[rank][job]`; one spawn for all."""
    return run_ranks(run_jobs, 2, (JOBS, str(tmp_path_factory.mktemp("told"))), timeout=900)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_save_and_leave_and_the_next_start_gives_the_same_numbers(case: str, outcomes: Any) -> None:
    job, step = CASES[case]
    index = JOBS.index((JOB + "told", job))
    for rank in (0, 1):
        outcome = outcomes[rank][index]
        assert not isinstance(outcome, str), outcome
        assert outcome["code"] == 75
        assert not [name for name in outcome["left"] if name.startswith(".")], "nothing half-written"
        saved = [name for name in outcome["left"] if name.startswith("checkpoint-")]
        assert (f"checkpoint-{step}" in saved) is (step > 0)
        assert outcome["resumed_at"] == step
        expected = outcomes[rank][JOBS.index(WITHOUT_EVALUATION) if "eval_strategy" in job else 0]
        assert outcome["logs"] == expected, "bit for bit the run that nobody stopped, evaluations too"
    assert outcomes[0][index]["microbatches"] == outcomes[1][index]["microbatches"]
    what, count = job["moment"]
    if what == "microbatch":
        assert outcomes[0][index]["microbatches"] <= count + 2


def test_signals_are_given_back(outcomes: Any) -> None:
    for rank in (0, 1):
        outcome = outcomes[rank][-1]
        assert not isinstance(outcome, str), outcome
        in_a_run, after, after_an_error = outcome["heard"][:3]
        assert (in_a_run, after, after_an_error) == (False, True, True)
        assert outcome["heard"][3:5] == [True, True], "save_on_signal is false"
        assert outcome["heard"][5:] == [True, True], "not the main thread"
