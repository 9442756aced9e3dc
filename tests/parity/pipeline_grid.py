"""A grid of pipeline cases on ranks, each against one process: what both files of cases share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parity.pipelines import PipelineCase, reference, run_cases
from tests.parity.train import relative

TOLERANCE = 1e-5
STEPS = 3 if FULL_GRID else 2
"""Weights after the second show what the optimizer's state is."""


def runner(grid: dict[str, list[PipelineCase]]) -> Callable[[str], list[list[object]] | str]:
    """`results(row)`: by rank and case. One spawn for all cases of a row; its error if it failed as a whole."""

    @functools.cache
    def results(row: str) -> list[list[object]] | str:
        try:
            return run_ranks(run_cases, grid[row][0].world, (grid[row],), timeout=7200 if FULL_GRID else 1200)
        except RuntimeError as error:  # kept, so that it is not tried again
            return str(error)

    return results


def check_equals_one_process(case: PipelineCase, outcome: list[list[object]] | str, index: int) -> None:
    """Loss on every rank, gradient norm, every weight."""
    assert not isinstance(outcome, str), outcome
    ranks = [rank[index] for rank in outcome]
    expected = reference(*case.work)
    held: dict[str, int] = {}
    for found in ranks:
        assert not isinstance(found, str), found
        assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=TOLERANCE)
        assert not case.outside or found["outside"] == pytest.approx(expected["outside"], rel=TOLERANCE)
        for name, weight in found["weights"].items():
            held[name] = held.get(name, 0) + 1
            assert relative(weight, expected["weights"][name]) < TOLERANCE, name
    assert held.keys() == expected["weights"].keys()
    assert min(held.values()) >= case.dp  # every weight on each data rank of its stage, and most of them nowhere else
    assert sum(held.values()) < case.world * len(held)
