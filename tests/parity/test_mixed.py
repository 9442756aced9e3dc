"""Every axis with every other: stages, parts of a matrix, parts of a sequence, experts, shards and copies equal one process.

Four ranks, and cells in which every pair of settings appears; all cells, and pairs on eight ranks, with HF_DIST_FULL_GRID=1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.covering import FULL_GRID, Cell, cells
from tests.parity.train import relative
from tests.sequence.train import Case, ranks_of, reference

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


def world_of(cell: Cell) -> int:
    """Ranks of a cell."""
    return math.prod(int(cell[axis]) for axis in ("pp", "tp", "cp", "data"))


def allowed(cell: Cell, world: int) -> bool:
    """What can be together; `hf_dist/README.md` has the table of what cannot."""
    shard = cell["data"] * cell["cp"] // cell["copies"]
    return (
        world_of(cell) == world
        and cell["data"] % cell["copies"] == 0
        and (cell["copies"] == 1 or cell["stage"] == 3)  # shard groups are read at stage 3 only
        and shard % cell["ep"] == 0
        and sum(cell[axis] > 1 for axis in ("pp", "tp", "cp", "ep")) >= 1
    )


def case_of(cell: Cell) -> Case:
    """The case of one cell."""
    shard = cell["data"] * cell["cp"] // cell["copies"] if cell["copies"] > 1 else None
    rest = {key: cell[key] for key in ("pp", "tp", "cp", "ep", "stage", "checkpointing", "lora")}
    return Case("mixtral" if cell["ep"] > 1 else "llama", kinds=("plain",), shard=shard, accumulation=2, **rest)


def cases(world: int, full: bool = False) -> tuple[Case, ...]:
    """Cells of one world, pairwise or all."""
    return tuple(case_of(cell) for cell in cells(AXES, allowed=lambda cell: allowed(cell, world), full=full))


FOUR = cases(4, FULL_GRID)
EIGHT = cases(8) if FULL_GRID else ()


def check(all_cases: tuple[Case, ...], index: int, world: int) -> None:
    everyone = ranks_of(all_cases, world)
    assert not isinstance(everyone, str), everyone
    case = all_cases[index]
    for ranks in everyone:
        assert not isinstance(ranks[index], str), ranks[index]
    expected = reference(case, world // case.cp // case.pp // case.tp)
    seen = set()
    for ranks in everyone:
        assert ranks[index]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert ranks[index]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, weight in ranks[index]["weights"].items():
            assert relative(weight, expected["weights"][name]) < 1e-5, name
            seen.add(name)
    assert seen == expected["weights"].keys()


@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_of_mixed_axes_equal_one_process(index: int) -> None:
    check(FOUR, index, 4)


@pytest.mark.skipif(not FULL_GRID, reason="eight ranks: HF_DIST_FULL_GRID=1")
@pytest.mark.parametrize("index", range(len(EIGHT)), ids=[str(case) for case in EIGHT])
def test_eight_ranks_of_mixed_axes_equal_one_process(index: int) -> None:
    check(EIGHT, index, 8)
