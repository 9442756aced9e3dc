"""What kind of loss a model has is decided by rows that can tell, by all ranks together, whichever rows come first.

Rows without labels may be anywhere; every step equals the stock Trainer's in one process on the joined batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hf.loss_kinds import KINDS, outcome
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.window.test_raw_loops import RELATIVE

STEP = 4
"""Rows of a step."""
# Rows of the first microbatch, of the second one, of one rank's first, of both ranks' first, of a whole step.
UNLABELLED = [frozenset(rows) for rows in ((0, 1), (2, 3), (0,), (0, 2), (1, 3), (0, 1, 2, 3))]
JOBS: list[tuple[str, frozenset[int], int, int]] = [
    ("auxiliary" if i % 3 == 0 else "counted", rows, 1 + i % 2, 2 - i % 2) for i, rows in enumerate(UNLABELLED)
] + [(kind, frozenset(), batch, STEP // 2 // batch) for kind in KINDS[2:] for batch in (1, 2)]


def ours(job: tuple[str, frozenset[int], int, int]) -> Job:
    """The job of each of two ranks."""
    kind, rows, batch, accumulation = job
    given = {"kind": kind, "unlabelled": rows, "batch": batch, "accumulation": accumulation, "ours": True}
    return "tests.hf.loss_kinds:outcome", given


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [ours(job) for job in JOBS]}, tmp_path_factory)


def equal(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Losses, norms and weights."""
    for key in ("losses", "norms"):
        assert ours[key] == pytest.approx(stock[key], rel=RELATIVE, abs=RELATIVE), key
    for name, value in stock["weights"].items():
        assert ours["weights"][name].numpy() == pytest.approx(value.numpy(), rel=RELATIVE, abs=RELATIVE), name


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_two_ranks_equal_one_process(job: Any, outcomes: Any, tmp_path: Path) -> None:
    kind, rows, _, _ = job
    equal(found(outcomes, 2, ours(job))[0], outcome(tmp_path, kind, rows, STEP, 1, ours=False))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), rows=st.frozensets(st.integers(0, 7), max_size=7), batch=st.sampled_from([1, 2]))
def test_accumulation_equals_the_joined_batch(kind: str, rows: frozenset[int], batch: int, tmp_path: Path) -> None:
    rows = rows if kind in KINDS[:2] else frozenset()  # a mean over no token is not a number
    equal(
        outcome(tmp_path, kind, rows, batch, STEP // batch, ours=True),
        outcome(tmp_path, kind, rows, STEP, 1, ours=False),
    )
