"""Tracks elements through tensor code that only moves them, to find the boxes of root tensors behind each result.

The code (HF's weight conversions, in either direction) runs on meta tensors, so a model of any size costs nothing. Views
carry storage, offset and strides themselves. Copies (`contiguous`, `reshape`, `cat`, `stack`, a cast) are recorded.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist.checkpoint.pieces import Piece
from hf_dist.tensors.tensor_slice import TensorSlice, strides_of

__all__ = ["Provenance", "Trail", "UntraceableError", "sliced"]

aten = torch.ops.aten
MAX_PIECES = 4096
"""Per tensor; more pieces mean that code shuffles single elements."""

_COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten._reshape_copy.default,
    aten._reshape_alias_copy.default,
    aten.alias_copy.default,
}


class UntraceableError(Exception):
    """The values were computed, not moved, so no box of a root is behind them."""


@dataclass(frozen=True)
class _Box:
    """Positions offset + sum(index * stride) in a storage, in elements."""

    sizes: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Box:
        return cls(tuple(tensor.shape), int(tensor.storage_offset()), tensor.stride())

    def cut(self, dim: int, start: int, size: int) -> _Box:
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return _Box(sizes, self.offset + start * self.strides[dim], self.strides)

    def fold(self, dim: int, inner: int) -> _Box:
        """Split dimension `dim` in two, the inner one with `inner` steps."""
        outer, stride = self.sizes[dim] // inner, self.strides[dim]
        sizes = (*self.sizes[:dim], outer, inner, *self.sizes[dim + 1 :])
        return _Box(sizes, self.offset, (*self.strides[:dim], stride * inner, stride, *self.strides[dim + 1 :]))


@dataclass(frozen=True)
class _Copy:
    """A copy: a box of a new storage holds the elements of a box of an older storage, index by index."""

    target: _Box
    source: _Box
    storage: int

    @cached_property
    def _order(self) -> list[int]:
        """Dimensions with more than one index, longest step first."""
        several = (dim for dim, size in enumerate(self.target.sizes) if size > 1)
        return sorted(several, key=lambda dim: -self.target.strides[dim])

    def digits(self, position: int) -> tuple[int, ...] | None:
        """The box index at a distance in the target storage; None if the distance is not a sum of the box's strides."""
        found = [0] * len(self.target.sizes)
        for dim in self._order:
            found[dim], position = divmod(position, self.target.strides[dim])
        return None if position else tuple(found)

    def steps_inside(self, last: list[int], step: tuple[int, ...] | None, stride: int, size: int) -> int:
        """How many of `size` steps of `stride` stay in the box, starting at index `last`. At least 1."""
        if step is None:  # finer than the box
            gap = min(
                (s for s, size in zip(self.target.strides, self.target.sizes, strict=True) if size > 1), default=1
            )
            return gap // stride if gap % stride == 0 and size > gap // stride else 1
        room = [1 + (n - 1 - a) // b for a, b, n in zip(last, step, self.target.sizes, strict=True) if b]
        return min(room) if room else size

    def holds(self, position: int) -> bool:
        """Whether the box contains a position of the target storage."""
        index = self.digits(position - self.target.offset) if position >= self.target.offset else None
        return index is not None and all(i < size for i, size in zip(index, self.target.sizes, strict=True))


class Trail:
    """The origin of storages' elements, back to named roots. Several threads may write to it."""

    def __init__(self, *, casts: bool = False) -> None:
        """`casts`: elements may change dtype once, with rounding."""
        self._casts = casts
        self._roots: dict[int, str] = {}
        self._copies: dict[int, list[_Copy]] = {}  # by offset of the target
        self._cast: set[int] = set()  # storages whose elements changed dtype
        self._keep: list[object] = []  # keeps storages alive, so that no id is reused

    def add_root(self, name: str, tensor: torch.Tensor) -> None:
        """Name the whole storage of `tensor` `name`, as a root."""
        self._roots[_storage(tensor)] = name
        self._keep.append(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the elements of `tensor` are tracked."""
        return _storage(tensor) in self._roots or bool(self._copies.get(_storage(tensor)))

    def note(self, func: object, result: object, args: tuple[object, ...]) -> None:
        """Record that `func(*args)` returned `result`; a new storage is a copy or was computed."""
        for out in tree_leaves(result):
            if isinstance(out, torch.Tensor) and not (_storage(out) in self._roots or _storage(out) in self._copies):
                self._keep.append(out)
                copies = self._copies_of(func, out, args)
                self._copies[_storage(out)] = sorted(copies, key=lambda c: c.target.offset)

    def _copies_of(self, func: object, out: torch.Tensor, args: tuple[Any, ...]) -> list[_Copy]:
        if func in _COPIES:
            parts = [(_Box.of(out if out.shape == args[0].shape else out.view(args[0].shape)), args[0])]
        elif func in (aten.cat.default, aten.stack.default):
            dim = (args[1] if len(args) > 1 else 0) % out.dim()
            parts, begin, whole = [], 0, _Box.of(out)
            for part in args[0]:
                size = 1 if func is aten.stack.default else part.shape[dim]
                box = whole.cut(dim, begin, size)
                if func is aten.stack.default:
                    box = _Box(tuple(part.shape), box.offset, box.strides[:dim] + box.strides[dim + 1 :])
                if part.numel():
                    parts.append((box, part))
                begin += size
        else:
            return []
        cast = any(part.dtype != out.dtype for _, part in parts)
        earlier = any(_storage(part) in self._cast for _, part in parts)
        if cast and (earlier or not self._casts):
            return []
        if cast or earlier:
            self._cast.add(_storage(out))
        return [_Copy(into, _Box.of(part), _storage(part)) for into, part in parts]

    def pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """The boxes of roots that make up `tensor` in row-major order. Raises `UntraceableError`."""
        shape = tuple(tensor.shape)
        return self._resolve([(_Box.of(tensor), _storage(tensor), _Box(shape, 0, strides_of(shape)))])

    def _resolve(self, left: list[tuple[_Box, int, _Box]]) -> tuple[Piece, ...]:
        """The pieces of views; each view is a box of a storage that maps index by index to a target."""
        found: list[Piece] = []
        left = left[::-1]
        while left:
            view, storage, target = left.pop()
            if len(found) > MAX_PIECES:
                raise UntraceableError
            if storage in self._roots:
                name = self._roots[storage]
                found.append(Piece(name, view.sizes, view.offset, view.strides, target.offset, target.strides).merged())
            else:
                left += self._one_copy_back(view, storage, target)
        return tuple(found)

    def _one_copy_back(self, view: _Box, storage: int, target: _Box) -> list[tuple[_Box, int, _Box]]:
        """The view in the storage its elements came from; two parts of the view if no single copy holds all of it."""
        copy = _holder(self._copies.get(storage, []), view.offset)
        if copy is None:
            raise UntraceableError
        start = copy.digits(view.offset - copy.target.offset)
        assert start is not None
        last = list(start)
        source_strides = []
        for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
            step = copy.digits(stride) if size > 1 else (0,) * len(start)
            inside = copy.steps_inside(last, step, stride, size)
            if size > inside:
                # The view leaves the box: into another copy, or past the end of a dimension.
                if inside > 1 and size % inside == 0:
                    return [(view.fold(dim, inside), storage, target.fold(dim, inside))]
                parts = ((dim, inside, size - inside), (dim, 0, inside))
                return [(view.cut(*part), storage, target.cut(*part)) for part in parts]
            assert step is not None
            last = [a + (size - 1) * b for a, b in zip(last, step, strict=True)]
            source_strides.append(sum(b * s for b, s in zip(step, copy.source.strides, strict=True)))
        offset = copy.source.offset + sum(a * s for a, s in zip(start, copy.source.strides, strict=True))
        return [(_Box(view.sizes, offset, tuple(source_strides)), copy.storage, target)]


def _holder(copies: list[_Copy], position: int) -> _Copy | None:
    """The copy that contains a position: usually the last one that begins before it."""
    after = bisect.bisect_right(copies, position, key=lambda c: c.target.offset)
    return next((copies[k] for k in range(after - 1, -1, -1) if copies[k].holds(position)), None)


def sliced(pieces: Sequence[Piece], held: TensorSlice) -> list[tuple[int, Piece]]:
    """Convert pieces of a whole parameter into pieces of a slice of it, with sources counted in the slice. Each comes with its
    index in `pieces`.

    Elements outside the slice are dropped. Raises `UntraceableError` if the pieces do not cover the slice.
    """
    trail = Trail()
    trail._roots = {number: str(number) for number in range(len(pieces))}
    trail._copies[-1] = [
        _Copy(_Box(p.sizes, p.offset, p.strides), _Box(p.sizes, p.target_offset, p.target_strides), number)
        for number, p in sorted(enumerate(pieces), key=lambda item: item[1].offset)
    ]
    strides = strides_of(held.whole)
    views = []
    for box in held.boxes(0, held.numel):
        offset = sum(first * stride for first, stride in zip(box.offsets, strides, strict=True))
        views.append((_Box(box.sizes, offset, strides), -1, _Box(box.sizes, box.start, box.strides)))
    return [(int(piece.param), piece.flipped()) for piece in trail._resolve(views)]


class Provenance(TorchDispatchMode):
    """Inside the block, copies of the given meta tensors are tracked; `pieces(tensor)` then tells what each tensor holds."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._trail = Trail()
        for name, tensor in params.items():
            self._trail.add_root(name, tensor)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._trail.note(func, result, args)
        return result

    def pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """The boxes of parameters that make up `tensor` in row-major order. Raises `UntraceableError`."""
        return self._trail.pieces(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
