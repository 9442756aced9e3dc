"""An interval of a row-major tensor as axis-aligned boxes: the shape in which `torch.distributed.checkpoint` stores shards.

elements [5, 21) of a (6, 4) tensor: the end of row 1, rows 2 to 4, the beginning of row 5
. . . .
. A A A
B B B B
B B B B
B B B B
C . . .
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A block of a tensor whose elements are consecutive in row-major order."""

    offsets: tuple[int, ...]
    """First index along each dimension."""
    sizes: tuple[int, ...]
    start: int
    """First element, counted in the flattened tensor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut elements [start, stop) of a flattened tensor of `shape` into at most 2 * len(shape) - 1 boxes, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last or (first == last and start % row and stop % row and start // row == stop // row):
        yield from _inside(start // row, start, stop, shape)
        return
    if start % row:
        yield from _inside(first - 1, start, first * row, shape)
    if last > first:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row)
    if stop % row:
        yield from _inside(last, last * row, stop, shape)


def _inside(index: int, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of a part of the row with `index` along the first dimension."""
    base = index * math.prod(shape[1:])
    for box in boxes(start - base, stop - base, shape[1:]):
        yield Box((index, *box.offsets), (1, *box.sizes), box.start + base)
