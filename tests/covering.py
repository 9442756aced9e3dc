"""A few cells of a grid that hold every combination of any two (or three) axes; all of them with HF_DIST_FULL_GRID=1.

A fault that needs at most `strength` settings to show is in one of them, whatever the other axes are. A new axis is one more
entry of the dict.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["FULL_GRID", "Cell", "cells"]

FULL_GRID = os.environ.get("HF_DIST_FULL_GRID") == "1"
Cell = dict[str, Any]
"""Axis -> value."""


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
    product = [cell for cell in product if allowed(cell)]
    if full:
        return product
    wanted = [set(_combinations(cell, min(strength, len(axes)))) for cell in product]
    missing = set().union(*wanted)
    # Of equals not the first in order, or all cells would have the first values of every axis.
    order = random.Random(0).sample(range(len(product)), len(product))
    # Greedy: the cell that brings most. What a cell brings only shrinks, so an old count is a bound and few are counted again.
    bounds = [len(combinations) for combinations in wanted]
    chosen = []
    while missing:
        best, most = -1, 0
        for i in sorted(order, key=lambda i: -bounds[i]):
            if bounds[i] <= most:
                break
            bounds[i] = len(wanted[i] & missing)
            if bounds[i] > most:
                best, most = i, bounds[i]
        missing -= wanted[best]
        chosen.append(best)
    return [product[i] for i in sorted(chosen)]


def _combinations(cell: Cell, strength: int) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(cell.items(), strength)
