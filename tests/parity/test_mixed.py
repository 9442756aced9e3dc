"""Every axis with every other: stages, parts of a matrix, parts of a sequence, experts, shards and copies equal one process.

Four ranks, and cells in which every pair of parallel axes and every other setting appears in fp32, every parallel axis in half
precision; with HF_DIST_FULL_GRID=1 also every pair of settings, and every mixture of axes, on four ranks and on eight (14
minutes).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.covering import FULL_GRID, PAIRS, Cell, cells, chosen, some_of
from tests.parallel.sequence.train import Case, check, expected_of, ranks_of, wrong

AXES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2),
    "tp": (1, 2),
    "cp": (1, 2),
    "ep": (1, 2),
    "data": (1, 2, 4),
    "copies": (1, 2),
    "stage": (0, 1, 2, 3),
    "checkpointing": (False, True),
    "lora": (False, True),
}
"""`data`: ranks that read different rows, `copies` of what is sharded among them."""
OVER: dict[str, tuple[Any, ...]] = {**AXES, "copies": (2,), "stage": (1, 2, 3), "over": (True,)}
"""Cells of their own, in which the optimizer is sharded over the copies, too."""
COLUMNS: dict[str, tuple[Any, ...]] = {
    "offload": ((), ("offload",), ("offload", "offload_param")),
    "files": (False, True),
    "budget": (False, True),
}
"""What else a job has: where states rest, a streamed load and an export, a budget of memory."""
HALF: dict[str, tuple[Any, ...]] = {
    **{axis: AXES[axis] for axis in ("pp", "tp", "cp", "ep", "data", "stage")},
    **({name: COLUMNS[name] for name in ("offload", "files")} if FULL_GRID else {}),
    "dtype": ("bf16", "fp16"),
}
"""Cells of their own, every value once: pairs are compared in fp32. How near they have to be is the rule of `hf-dist check`."""
PARALLEL = ("pp", "tp", "cp", "ep")
LOWEST_STAGE = dict(zip(COLUMNS["offload"], (0, 1, 3), strict=True))


def world_of(cell: Cell) -> int:
    """Ranks of a cell."""
    return math.prod(int(cell[axis]) for axis in ("pp", "tp", "cp", "data"))


def allowed(cell: Cell, world: int) -> bool:
    """What can be together; `hf_dist/config/README.md` has the table of what cannot."""
    copies, over = cell.get("copies", 1), cell.get("over", False)
    shard = cell["data"] * cell["cp"] // copies
    return (
        world_of(cell) == world
        and cell["data"] % copies == 0
        and ("offload" not in cell or LOWEST_STAGE[cell["offload"]] <= cell["stage"])
        and (copies == 1 or cell["stage"] == 3 or (over and cell["stage"] > 0))  # else read at stage 3 only
        and (copies > 1 or not over)
        and shard % cell["ep"] == 0
        and sum(cell[axis] > 1 for axis in PARALLEL) >= 1
    )


def case_of(cell: Cell) -> Case:
    """The case of one cell."""
    copies = cell.get("copies", 1)
    shard = cell["data"] * cell["cp"] // copies if copies > 1 else None
    rest = {key: value for key, value in cell.items() if key not in ("data", "copies", "offload")}
    rest |= dict.fromkeys(cell.get("offload", ()), True)
    return Case("mixtral" if cell["ep"] > 1 else "llama", kinds=("plain",), shard=shard, accumulation=2, **rest)


def settings(cell: Cell, *axes: str) -> Cell:
    """Of these axes."""
    return {axis: cell[axis] for axis in axes}


def mixture(cell: Cell) -> Cell:
    """What is in a cell: pairs of parallel axes, and every other setting by itself."""
    pairs = {f"{a} {b}": (cell[a], cell[b]) for a, b in itertools.combinations(PARALLEL, 2)}
    return pairs | settings(cell, *(axis for axis in (*AXES, *COLUMNS) if axis not in PARALLEL))


def cases(world: int, full: bool = False) -> tuple[Case, ...]:
    """Cells of one world: every pair of settings in fp32; `full`: all mixtures of axes, too, without columns."""

    def possible(cell: Cell) -> bool:
        return allowed(cell, world)

    found = chosen(cells({**AXES, **COLUMNS}, allowed=possible, full=False), mixture, 1)
    # Stages and data ranks in half precision: `test_bf16.py`.
    found += chosen(
        cells(HALF, PAIRS, allowed=possible, full=False), lambda cell: settings(cell, *PARALLEL, "dtype"), 1
    )
    found += chosen(cells(OVER, PAIRS, allowed=possible, full=False), lambda cell: settings(cell, *OVER), 1)
    more = cells(AXES, allowed=possible, full=True) + cells(OVER, allowed=possible, full=True) if full else []
    return tuple(case_of(cell) for cell in found + more)


BY_DEFAULT = (
    "llama-auto-z0-cp2-pp2-checkpointing-lora-budget",
    "mixtral-auto-z2-cp2-tp2-ep2-files",
    "llama-auto-z3-cp1-bf16-pp2",
)
"""Every parallel axis beside two others, or data ranks. Copies: `test_grid.py`; stages of cut matrices: `test_pipeline.py`."""
FOUR = cases(4, True) if FULL_GRID else tuple(some_of({str(case): case for case in cases(4)}, *BY_DEFAULT).values())
EIGHT = cases(8, True) if FULL_GRID else ()


@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_of_mixed_axes_equal_one_process(index: int) -> None:
    check(FOUR, index, 4)


@pytest.mark.parametrize("index", [i for i, case in enumerate(FOUR) if case.dtype != "fp32"])
def test_a_loss_that_is_wrong_by_less_than_one_in_a_thousand_fails_in_half_precision(index: int) -> None:
    expected, allowed = expected_of(FOUR, FOUR[index], 4)
    found = [ranks[index] for ranks in ranks_of(FOUR, 4)]
    assert not wrong(found, expected, allowed)
    for factor in (1 + 5e-4, 1 - 5e-4):
        off = [{**ranks, "losses": [*ranks["losses"][:-1], ranks["losses"][-1] * factor]} for ranks in found]
        assert wrong(off, expected, allowed) == ["losses"] * len(found)


@pytest.mark.skipif(not FULL_GRID, reason="eight ranks: HF_DIST_FULL_GRID=1")
@pytest.mark.parametrize("index", range(len(EIGHT)), ids=[str(case) for case in EIGHT])
def test_eight_ranks_of_mixed_axes_equal_one_process(index: int) -> None:
    check(EIGHT, index, 8)
