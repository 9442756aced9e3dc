"""Maps elements of a parameter to elements of stored tensors. Pure arithmetic.

    parameter  gate_up_proj [E, 2I, H]      one Piece per stored tensor: a box of the parameter, a box of the tensor
    on disk    experts.e.gate_proj.weight   offset e*2I*H,        sizes (I*H,), strides (1,)
               experts.e.up_proj.weight     offset e*2I*H + I*H,  sizes (I*H,), strides (1,)

A row-major interval of a parameter is one contiguous byte range of the file if the strides allow it, so every rank
reads and writes its own range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_dist.tensors.tensor_slice import TensorSlice, strides_of

__all__ = ["Piece", "Run"]

SHORTEST_RUN = 64
"""Elements. A parameter with shorter runs on disk is assembled first, because a write per element would be slow."""


@dataclass(frozen=True)
class Run:
    """Elements that are neighbours both in the parameter and on disk."""

    source: int
    """First element in the flattened parameter."""
    target: int
    """First element in the flattened stored tensor."""
    numel: int


@dataclass(frozen=True)
class Piece:
    """A box of a parameter that equals a box of a stored tensor: `as_strided` arguments of both, in elements."""

    param: str
    sizes: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @classmethod
    def whole(cls, param: str, numel: int) -> Piece:
        """A whole parameter, unchanged."""
        return cls(param, (numel,), 0, (1,), 0, (1,))

    def merged(self) -> Piece:
        """The same box with as few dimensions as possible."""
        dims: list[tuple[int, int, int]] = []
        for size, stride, target in zip(self.sizes, self.strides, self.target_strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride and dims[-1][2] == size * target:
                dims[-1] = (dims[-1][0] * size, stride, target)
            else:
                dims.append((size, stride, target))
        sizes, strides, targets = zip(*(dims or [(1, 1, 1)]), strict=True)
        return Piece(self.param, sizes, self.offset, strides, self.target_offset, targets)

    def flipped(self) -> Piece:
        """The same box from the stored tensor's side: sources are its elements, targets those of the parameter."""
        return Piece(self.param, self.sizes, self.target_offset, self.target_strides, self.offset, self.strides)

    def cut(self, dim: int, first: int, last: int) -> Piece:
        """Indices [first, last) along one of the dimensions."""
        sizes = (*self.sizes[:dim], last - first, *self.sizes[dim + 1 :])
        offset = self.offset + first * self.strides[dim]
        target = self.target_offset + first * self.target_strides[dim]
        return Piece(self.param, sizes, offset, self.strides, target, self.target_strides)

    def within(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of this box within elements [start, stop) of the parameter, as boxes, in the parameter's order."""
        if not self.numel or self.stop <= start or stop <= self.offset:
            return
        if start <= self.offset and self.stop <= stop:
            yield self
            return
        dim = max((d for d, size in enumerate(self.sizes) if size > 1), key=lambda d: self.strides[d])
        stride, size = self.strides[dim], self.sizes[dim]
        rest = self.stop - self.offset - (size - 1) * stride  # elements from the first to the last of one index
        begin = min(max(-(-(start - self.offset) // stride), 0), size)  # [begin, end) lies inside as a whole
        end = min(max((stop - rest - self.offset) // stride + 1, begin), size)
        for index in range(max((start - rest - self.offset) // stride + 1, 0), begin):
            yield from self.cut(dim, index, index + 1).within(start, stop)
        if begin < end:
            yield self.cut(dim, begin, end)
        for index in range(end, min((stop - 1 - self.offset) // stride + 1, size)):
            yield from self.cut(dim, index, index + 1).within(start, stop)

    def target_of(self, index: int) -> int | None:
        """The element of the stored tensor that holds element `index` of the parameter; None if it is not in the box."""
        left, target = index - self.offset, self.target_offset
        order = sorted((d for d, size in enumerate(self.sizes) if size > 1), key=lambda d: -self.strides[d])
        for dim in order:
            step, left = divmod(left, self.strides[dim])
            if not 0 <= step < self.sizes[dim]:
                return None
            target += step * self.target_strides[dim]
        return None if left else target

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """One past the box's last element in the flattened parameter."""
        steps = ((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset + sum(steps) + 1 if self.numel else 0

    @property
    def run_numel(self) -> int:
        """Number of elements that are neighbours on both sides."""
        return self.sizes[-1] if self.strides[-1] == self.target_strides[-1] == 1 else 1

    @property
    def scattered(self) -> bool:
        """Whether neighbours in the parameter lie apart on disk, as in a transposed tensor."""
        return self.run_numel < SHORTEST_RUN and self.numel > SHORTEST_RUN * self.run_numel

    def runs(self, start: int, stop: int, held: TensorSlice | None = None) -> Iterator[Run]:
        """The runs within elements [start, stop) of the parameter, in the order of the stored tensor.

        `held`: elements and run sources count within that slice of the parameter.
        """
        source, target, numel = self._all_runs()
        if held is None or held.everything:
            low, high = np.maximum(source, start), np.minimum(source + numel, stop)
            kept = np.flatnonzero(low < high)
            source, target, numel = low[kept], (target + low - source)[kept], (high - low)[kept]
        else:
            source, target, numel = _through(held, start, stop, source, target, numel)
        order = np.argsort(target, kind="stable")
        for run in zip(source[order].tolist(), target[order].tolist(), numel[order].tolist(), strict=True):
            yield Run(*run)

    def _all_runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sources, targets and lengths, in row-major order of the box."""
        length = self.run_numel
        outer = len(self.sizes) - (1 if length == self.sizes[-1] else 0)
        source: np.ndarray = np.full((), self.offset, dtype=np.int64)
        target: np.ndarray = np.full((), self.target_offset, dtype=np.int64)
        for size, stride, target_stride in zip(
            self.sizes[:outer], self.strides[:outer], self.target_strides[:outer], strict=True
        ):
            steps = np.arange(size, dtype=np.int64)
            source = source[..., None] + steps * stride
            target = target[..., None] + steps * target_stride
        source, target = source.reshape(-1), target.reshape(-1)
        return source, target, np.full(source.shape, length, dtype=np.int64)


def _through(
    held: TensorSlice, start: int, stop: int, source: np.ndarray, target: np.ndarray, numel: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert runs of a whole parameter into runs of elements [start, stop) of a slice of it."""
    local, whole, count = _held_runs(held, start, stop)
    first = np.searchsorted(whole + count, source, side="right")  # the held runs that meet each run: [first, last)
    last = np.searchsorted(whole, source + numel, side="left")
    meets = np.maximum(last - first, 0)
    run = np.repeat(np.arange(len(source)), meets)
    own = np.arange(len(run)) + np.repeat(first - (np.cumsum(meets) - meets), meets)
    low = np.maximum(source[run], whole[own])
    high = np.minimum(source[run] + numel[run], whole[own] + count[own])
    return low - whole[own] + local[own], target[run] + low - source[run], high - low


def _held_runs(held: TensorSlice, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Elements of [start, stop) of a slice that are also neighbours in the whole parameter, in the whole's order.

    Returns first elements in the slice, first elements in the whole, lengths.
    """
    strides = strides_of(held.whole)
    found = [(np.empty(0, dtype=np.int64),) * 3]
    for box in held.boxes(start, stop):
        offset = sum(first * stride for first, stride in zip(box.offsets, strides, strict=True))
        found.append(Piece("", box.sizes, box.start, box.strides, offset, strides).merged()._all_runs())
    local, whole, count = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(whole, kind="stable")
    return local[order], whole[order], count[order]
