"""A few cells of a grid that hold every combination of any two (or three) axes; all of them with HF_DIST_FULL_GRID=1.

A fault that needs at most `strength` settings to show is in one of them, whatever the other axes are. A new axis is one more
entry of the dict.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["FULL_GRID", "FULL_GRID_ONLY", "PAIRS", "Cell", "cells", "chosen", "some_of"]

FULL_GRID = os.environ.get("HF_DIST_FULL_GRID") == "1"
PAIRS = 2 if FULL_GRID else 1
"""The strength of a grid beside others of the same mechanism: every value once, every pair with HF_DIST_FULL_GRID=1."""
FULL_GRID_ONLY = pytest.mark.skipif(not FULL_GRID, reason="runs with HF_DIST_FULL_GRID=1")
"""A test that finds no planted fault which a cheaper one does not find."""
Cell = dict[str, Any]
"""Axis -> value."""
Case = TypeVar("Case")
Name = TypeVar("Name")


def cells(
    axes: Mapping[str, Sequence[Any]],
    strength: int = 2,
    *,
    allowed: Callable[[Cell], bool] = lambda cell: True,
    full: bool = FULL_GRID,
) -> list[Cell]:
    """Cells of the product of `axes` among which every allowed combination of any `strength` of them appears.

    The same on every call, in the order of the product. `allowed`: cells that exist at all, such as a shard that divides the
    ranks. `full`: every allowed cell.
    """
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return chosen([cell for cell in product if allowed(cell)], lambda cell: cell, strength, full=full)


def some_of(cases: Mapping[Name, Case], *names: Name, full: bool = FULL_GRID) -> dict[Name, Case]:
    """Those of the named `cases` that run by default: `names`, in the order of `cases`. `full`: every case.

    `KeyError` for a name that is none of theirs.
    """
    if missing := set(names) - set(cases):
        raise KeyError(f"no such cases: {missing}")
    return {name: case for name, case in cases.items() if full or name in names}


def chosen(
    cases: Sequence[Case], axes: Callable[[Case], Mapping[str, Any]], strength: int = 2, *, full: bool = FULL_GRID
) -> list[Case]:
    """As `cells`, among cases that are given: every combination of `strength` values that one of them has is in one of these.

    `axes(case)`: what tells cases apart. An axis may be coarser than the setting: stages 0 to 2 run the same passes.
    """
    if full:
        return list(cases)
    named = [axes(case) for case in cases]
    wanted = [set(_combinations(cell, min(strength, len(cell)))) for cell in named]
    missing = set().union(*wanted)
    # Of equals not the first in order, or all cells would have the first values of every axis.
    order = random.Random(0).sample(range(len(cases)), len(cases))
    # Greedy: the cell that brings most. What a cell brings only shrinks, so an old count is a bound and few are counted again.
    bounds = [len(combinations) for combinations in wanted]
    found = []
    while missing:
        best, most = -1, 0
        for i in sorted(order, key=lambda i: -bounds[i]):
            if bounds[i] <= most:
                break
            bounds[i] = len(wanted[i] & missing)
            if bounds[i] > most:
                best, most = i, bounds[i]
        missing -= wanted[best]
        found.append(best)
    return [cases[i] for i in sorted(found)]


def _combinations(cell: Mapping[str, Any], strength: int) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(cell.items(), strength)
