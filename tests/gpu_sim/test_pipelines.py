"""Pipelines on simulated GPUs: every rank's trace, and all of them replayed together over NCCL's blocking first use."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID, Cell, cells
from tests.gpu_sim import library
from tests.gpu_sim.order import faults
from tests.gpu_sim.pipelines import PipelineSetting
from tests.gpu_sim.replay import replay
from tests.gpu_sim.server import simulate
from tests.gpu_sim.trace import Trace
from tests.gpu_sim.training import report

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

AXES: dict[str, Any] = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"),
    "stages": (2, 4),
    "zero": ((1, 0), (2, 1), (2, 3)),
    "evaluates": (False, True),
    "tensor": (1, 2),
}
"""zero: data ranks and ZeRO's stage; tensor: ranks that share every layer, and parts of the sequence."""


FEW = [
    dict(schedule="interleaved_1f1b", stages=2, zero=(2, 3), evaluates=True, tensor=1),
    dict(schedule="zb_h1", stages=2, zero=(2, 1), evaluates=False, tensor=2),
]
"""The orders that differ most from 1f1b's, which is below; four stages are four processes."""
GRID = [cell for cell in cells(AXES, full=True) if FULL_GRID or cell in FEW]
WITHOUT = "connecting the channels, with receives posted before the sends they depend on"


def setting(cell: Cell) -> PipelineSetting:
    data, stage = cell["zero"]
    steps, microbatches = 2, 4
    if (
        not FULL_GRID
    ):  # who waits for whom shows at first; stages of which a rank has two take their microbatches in pairs
        steps, microbatches = 1, 2
    more = dict(evaluates=cell["evaluates"], tensor=cell["tensor"])
    return PipelineSetting(cell["schedule"], cell["stages"], data, stage, microbatches, steps, **more)


def name(cell: Cell) -> str:
    data, stage = cell["zero"]
    more = (
        f"-zero{stage}" * (data > 1)
        + "-evaluates" * cell["evaluates"]
        + f"-tensor{cell['tensor']}" * (cell["tensor"] > 1)
    )
    return f"{cell['schedule']}{cell['stages']}{more}"


@functools.cache
def traces(case: PipelineSetting, without: str = "") -> list[Trace]:
    return simulate("tests.gpu_sim.pipelines:train", case, without, ranks=case.ranks)


grid = pytest.mark.parametrize("cell", GRID, ids=name)


@grid
def test_all_ranks_come_to_their_end(cell: Cell) -> None:
    outcome = replay(traces(setting(cell)))
    assert outcome.hung == []
    assert outcome.busy


@grid
def test_few_hardware_queues_make_it_slower_and_do_not_hang_it(cell: Cell) -> None:
    assert replay(traces(setting(cell)), queues=1).hung == []


@grid
def test_nothing_is_read_too_early_or_freed_too_early(cell: Cell) -> None:
    for trace in traces(setting(cell)):
        assert list(map(str, faults(trace))) == [], trace.rank
        assert report(trace).late == [], trace.rank


def test_without_the_warm_up_of_the_channels_the_first_window_hangs_and_is_named() -> None:
    outcome = replay(traces(PipelineSetting(steps=1, microbatches=2), WITHOUT))
    assert len(outcome.hung) == 2
    assert all("first use" in line and "parallel/pipeline/p2p.py" in line for line in outcome.hung), outcome.hung
