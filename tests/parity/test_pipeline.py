"""Pipeline stages x data ranks x ZeRO stage equal one process: loss on every rank, gradient norm, every weight."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.covering import FULL_GRID, PAIRS, Cell, cells, chosen, some_of
from tests.parity.pipeline_grid import STEPS, check_equals_one_process, runner
from tests.parity.pipelines import PipelineCase

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
AXES = {
    "pp": (2, 3, 4),
    "dp": (1, 2),
    "stage": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "microbatches": (2, 4, 5),
    "tied": (False, True),
    "checkpointing": (False, True),
}
"""A new axis is one more entry, and a field of `PipelineCase`."""


def llama_case(cell: Cell) -> PipelineCase:
    """The case of one cell."""
    schedule, virtual = cell["schedule"]
    rest = {axis: value for axis, value in cell.items() if axis != "schedule"}
    return PipelineCase("Llama", schedule=schedule, virtual=virtual, **rest)


CUT = [
    PipelineCase("Llama", stage=0, tp=2, microbatches=3, evaluates=True),
    PipelineCase("Llama", stage=1, tp=2, checkpointing=True, microbatches=5),
    PipelineCase("Llama", stage=2, schedule="gpipe", tp=2, microbatches=3, tied=True, checkpointing=True),
    PipelineCase("Llama", stage=3, schedule="interleaved_1f1b", virtual=2, tp=2, checkpointing=True),
    PipelineCase(
        "Llama", stage=1, schedule="interleaved_1f1b", virtual=2, tp=2, microbatches=3, tied=True, overlap=True
    ),
    PipelineCase("Llama", stage=1, schedule="zb_h1", tp=2, tied=True, microbatches=3),
    PipelineCase("Llama", stage=3, schedule="zb_h1", tp=2, microbatches=3, overlap=True, evaluates=True),
    PipelineCase("Llama", stage=3, tp=2, microbatches=3, overlap=True, checkpointing=True, offload=True),
]
"""Parts of sequences travel between stages: microbatches of three lengths in flight, on every schedule."""
CUT = CUT + [replace(case, dp=2) for case in CUT] if FULL_GRID else CUT  # `dp=2`: eight ranks
BY_DEFAULT = (
    "Llama-pp2-dp1-z3-interleaved_1f1bx2-m4-tied",
    "Llama-pp2-dp1-z3-gpipe-m4-checkpointing",
    "Llama-pp2-dp1-z2-zb_h1-m2-tied-checkpointing",
    "Llama-pp2-dp1-z1-zb_h1-m4-tied-muon",
    "Llama-pp3-dp1-z0-1f1b-m5-tied-outside",
    "Llama-pp2-dp2-z3-1f1b-m4-reshard",
    "Llama-pp2-dp1-z1-zb_h1-m3-tied-tp2",
)
"""Every schedule and stage of ZeRO. Offload and checkpoints of stages: `test_mixed_life.py`."""


def llama_cases() -> list[PipelineCase]:
    """Every setting, and on two ranks every schedule; all cells with HF_DIST_FULL_GRID=1."""
    two_ranks = chosen(
        cells({"stage": AXES["stage"], "schedule": SCHEDULES}, full=True),
        lambda cell: {"stage": cell["stage"], "schedule": (cell["schedule"], cell["stage"] == 3)},
        PAIRS,
    )
    turns = itertools.cycle(itertools.product((2, 4, 5), (False, True), (False, True)))
    cases = [
        llama_case(cell) for cell in cells(AXES, PAIRS, allowed=lambda cell: FULL_GRID or cell["pp"] * cell["dp"] <= 4)
    ]
    for cell, (count, tied, checkpointing) in zip(two_ranks, turns, strict=False):
        cell |= {"pp": 2, "dp": 1, "microbatches": count, "tied": tied, "checkpointing": checkpointing}
        cases.append(llama_case(cell))
    cases.append(PipelineCase("Llama", 3, 1, 1, "interleaved_1f1b", 2, 5, tied=True, checkpointing=True))
    for pp, dp in [(pp, dp) for pp in AXES["pp"] for dp in AXES["dp"]] if FULL_GRID else [(2, 2)]:
        cases += [
            PipelineCase("Llama", pp, dp, 3, reshard=True),
            PipelineCase("Llama", pp, dp, 2, "gpipe", reshard=True),
            PipelineCase("Llama", pp, dp, 3, offload=True),
            PipelineCase("Llama", pp, dp, 1, "zb_h1", tied=True, offload=True),
        ]
    if FULL_GRID:
        cases += [
            PipelineCase("Llama", 2, 1, 0, "interleaved_1f1b", 2, optimizer="muon"),
            PipelineCase("Llama", 2, 2, 1, optimizer="muon"),
        ]
    cases += [
        PipelineCase("Llama", 2, 1, 1, "zb_h1", tied=True, optimizer="muon"),
        PipelineCase("Llama", 2, 2, 3, optimizer="muon"),
        PipelineCase("Llama", 2, 2, 3, optimizer="lamb"),
        PipelineCase("Llama", 2, 2, 2, tied=True, optimizer="adafactor"),
    ]
    # Two of three ranks have the embedding.
    cases = [replace(case, outside=case.tied and case.pp == 3) for case in cases]
    return list(some_of({str(case): case for case in dict.fromkeys([*cases, *CUT])}, *BY_DEFAULT).values())


GRID: dict[str, list[PipelineCase]] = {}
for llama in llama_cases():
    GRID.setdefault(f"{llama.world} ranks", []).append(replace(llama, steps=STEPS))
results = runner(GRID)


@pytest.mark.parametrize(
    ("row", "index"),
    [pytest.param(row, i, id=str(case)) for row, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process(row: str, index: int) -> None:
    check_equals_one_process(GRID[row][index], results(row), index)
