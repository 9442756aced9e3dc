"""Parts of a row-major tensor: the slice of a stored parameter that a rank keeps, and its intervals as axis-aligned boxes.

elements [5, 21) of a (6, 4) tensor: the end of row 1, rows 2 to 4, the beginning of row 5
. . . .
. A A A
B B B B
B B B B
B B B B
C . . .

Files use indices of whole parameters, memory those of the kept slice. Only `TensorSlice` translates between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Box", "TensorSlice", "strides_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A block of a whole tensor, and the position of its elements in the flattened slice that is kept."""

    offsets: Shape
    """First index along each dimension of the whole tensor."""
    sizes: Shape
    start: int
    """Index of its first element in the flattened slice."""
    strides: Shape
    """Strides in the flattened slice; with `sizes` and `start`, the arguments of `as_strided`."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """Elements of the flattened slice from the block's first to its last, both included."""
        steps = ((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return sum(steps) + 1 if self.numel else 0

    @property
    def index(self) -> tuple[slice, ...]:
        """The block as an index into the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class TensorSlice:
    """Concatenated ranges of each dimension of a tensor: rows, columns, both halves of a fused weight, some experts.

        whole (4, 6), ranges ((0, 4),), ((0, 1), (3, 4)): columns 0 and 3, kept as a tensor of shape (4, 2)

    An uncut parameter has the slice `all`.
    """

    whole: Shape
    """Shape of the tensor as files have it."""
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    """For each dimension, the kept intervals [first, last) in their order in memory."""

    def __post_init__(self) -> None:
        assert len(self.ranges) == len(self.whole), self
        assert all(0 <= a <= b <= n for n, some in zip(self.whole, self.ranges, strict=True) for a, b in some), self

    @classmethod
    def all(cls, shape: Sequence[int]) -> TensorSlice:
        """The whole of a tensor of `shape`."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @classmethod
    def of(cls, part: TensorSlice | Sequence[int]) -> TensorSlice:
        """`part` itself, or all of a tensor of that shape."""
        return part if isinstance(part, TensorSlice) else cls.all(part)

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, *ranges: tuple[int, int]) -> TensorSlice:
        """The given ranges of dimension `dim` and all of the other dimensions."""
        dim %= len(shape)
        return cls(tuple(shape), tuple(ranges if d == dim else ((0, size),) for d, size in enumerate(shape)))

    @cached_property
    def shape(self) -> Shape:
        """Shape of the kept slice."""
        return tuple(sum(last - first for first, last in some) for some in self.ranges)

    @cached_property
    def everything(self) -> bool:
        """Whether the slice is the whole tensor in its original order."""
        return all(some == ((0, size),) for some, size in zip(self.ranges, self.whole, strict=True))

    @property
    def numel(self) -> int:
        """Number of kept elements."""
        return math.prod(self.shape)

    @property
    def whole_numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.whole)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This slice of a whole tensor: a tensor of `shape`, with its own memory unless `everything`."""
        for dim, some in enumerate(self.ranges):
            if some != ((0, tensor.shape[dim]),):
                tensor = torch.cat([tensor.narrow(dim, first, last - first) for first, last in some], dim)
        return tensor

    def put(self, part: torch.Tensor, into: torch.Tensor) -> None:
        """Write a tensor of `shape` to its places in a whole tensor: the inverse of `take`."""
        flat = part.reshape(-1)
        for box in self.boxes(0, self.numel):
            into[box.index] = flat.as_strided(box.sizes, box.strides, flat.storage_offset() + box.start)

    def in_whole(self, index: int) -> int:
        """The flattened index in the whole tensor for a flattened index in the slice."""
        if self.everything:
            return index
        found = 0
        for size, whole, stride, some in zip(self.shape, self.whole, strides_of(self.shape), self.ranges, strict=True):
            at = index // stride % size
            for first, last in some:
                if at < last - first:
                    found = found * whole + first + at
                    break
                at -= last - first
        return found

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Elements [start, stop) of the flattened slice as boxes of the whole tensor.

        For a whole tensor at most 2 * dimensions - 1 boxes, in element order, each contiguous; else that many for each
        combination of ranges.
        """
        strides = strides_of(self.shape)
        for offsets, sizes in _boxes(start, stop, self.shape):
            pieces = [list(_cut(*piece)) for piece in zip(offsets, sizes, self.ranges, strict=True)]
            for piece in itertools.product(*pieces):
                begins = sum(local * stride for (local, _, _), stride in zip(piece, strides, strict=True))
                yield Box(tuple(first for _, first, _ in piece), tuple(size for *_, size in piece), begins, strides)


def strides_of(shape: Shape) -> Shape:
    """Strides of a contiguous tensor of `shape`; at least 1 each."""
    steps = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)
    return tuple(steps)[::-1] if shape else ()


def _cut(first: int, size: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pieces (index in the slice, index in the whole, length) of the interval [first, first + size) of one dimension."""
    begin = 0
    for low, high in ranges:
        a, b = max(first, begin), min(first + size, begin + high - low)
        if a < b:
            yield a, low + a - begin, b - a
        begin += high - low


def _boxes(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """(offsets, sizes) of the boxes, at most 2 * len(shape) - 1, that elements [start, stop) of a tensor form, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last or (first == last and start % row and stop % row and start // row == stop // row):
        yield from _inside(start // row, start, stop, shape)
        return
    if start % row:
        yield from _inside(first - 1, start, first * row, shape)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if stop % row:
        yield from _inside(last, last * row, stop, shape)


def _inside(index: int, start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Boxes of elements [start, stop), all in the row `index` of the first dimension."""
    base = index * math.prod(shape[1:])
    for offsets, sizes in _boxes(start - base, stop - base, shape[1:]):
        yield (index, *offsets), (1, *sizes)
