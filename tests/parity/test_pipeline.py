"""Pipeline stages x data ranks x ZeRO stage equal one process: loss on every rank, gradient norm, every weight."""

from __future__ import annotations

import functools
import itertools
import os

import pytest

from tests.harness import run_ranks
from tests.parity.pipelines import PipelineCase, reference, run_cases
from tests.parity.train import relative
from tests.pipeline.zoo import CONFIGS

TOLERANCE = 1e-5
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
WORK = list(itertools.product((2, 4, 5), (False, True), (False, True)))  # microbatches, tied, checkpointing


def llama_cases(pp: int, dp: int) -> list[PipelineCase]:
    """ZeRO stage x schedule, and over these the rest in turn; all of it with HF_DIST_FULL_GRID=1."""
    cells = list(itertools.product((0, 1, 2, 3), SCHEDULES))
    full = os.environ.get("HF_DIST_FULL_GRID") == "1"
    cases = []
    for i, (stage, (schedule, virtual)) in enumerate(cells):
        for count, tied, checkpointing in WORK if full else [WORK[(5 * i + pp + 7 * dp) % len(WORK)]]:
            cases.append(PipelineCase("Llama", pp, dp, stage, schedule, virtual, count, tied, checkpointing))
    return [
        *cases,
        PipelineCase("Llama", pp, dp, 3, reshard=True),
        PipelineCase("Llama", pp, dp, 2, "gpipe", reshard=True),
        PipelineCase("Llama", pp, dp, 3, offload=True),
        PipelineCase("Llama", pp, dp, 1, "zb_h1", tied=True, offload=True),
    ]


FAMILIES = [PipelineCase(family, 2, 2, 3) for family in CONFIGS if family != "Llama"]
GRID = {f"pp{pp}-dp{dp}": llama_cases(pp, dp) for pp in (2, 3, 4) for dp in (1, 2)}
GRID |= {"families": FAMILIES[::2], "more families": FAMILIES[1::2]}


@functools.cache
def results(row: str) -> list[list[object]] | str:
    """One spawn for all cases of a row; its error if it failed as a whole, so that it is not tried again."""
    try:
        return run_ranks(run_cases, GRID[row][0].world, (GRID[row],), timeout=1200)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("row", "index"),
    [pytest.param(row, i, id=str(case)) for row, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process(row: str, index: int) -> None:
    case, outcome = GRID[row][index], results(row)
    assert not isinstance(outcome, str), outcome
    ranks = [rank[index] for rank in outcome]
    expected = reference(*case.work)
    held: dict[str, int] = {}
    for found in ranks:
        assert not isinstance(found, str), found
        assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for name, weight in found["weights"].items():
            held[name] = held.get(name, 0) + 1
            assert relative(weight, expected["weights"][name]) < TOLERANCE, name
    assert held.keys() == expected["weights"].keys()
    assert min(held.values()) >= case.dp  # every weight on each data rank of its stage, and most of them nowhere else
    assert sum(held.values()) < case.world * len(held)
