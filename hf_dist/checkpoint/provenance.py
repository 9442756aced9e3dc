"""Follows elements through tensor code that only moves them: which box of which parameter is behind each result.

The code (a reverse weight conversion) runs on meta tensors, so a model of any size costs nothing. Views keep their storage,
offset and strides by themselves; copies (`contiguous`, `reshape`, `cat`, `stack`) are noted while they happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist.checkpoint.pieces import Piece

__all__ = ["Provenance", "UntraceableError"]

aten = torch.ops.aten
MAX_PIECES = 4096
"""Per stored tensor; beyond it somebody shuffles single elements."""

_COPIES = {aten.clone.default, aten._reshape_copy.default, aten._reshape_alias_copy.default, aten.alias_copy.default}


class UntraceableError(Exception):
    """The values were computed, not moved: no box of a parameter is behind them."""


@dataclass(frozen=True)
class _Box:
    """Positions offset + sum(index * stride) in a storage, in elements."""

    sizes: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Box:
        return cls(tuple(tensor.shape), int(tensor.storage_offset()), tensor.stride())

    @classmethod
    def dense(cls, sizes: tuple[int, ...]) -> _Box:
        return cls.of(torch.empty(sizes, device="meta"))

    def cut(self, dim: int, start: int, size: int) -> _Box:
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return _Box(sizes, self.offset + start * self.strides[dim], self.strides)

    def fold(self, dim: int, inner: int) -> _Box:
        """Dimension `dim` as two, the inner one with `inner` steps."""
        outer, stride = self.sizes[dim] // inner, self.strides[dim]
        sizes = (*self.sizes[:dim], outer, inner, *self.sizes[dim + 1 :])
        return _Box(sizes, self.offset, (*self.strides[:dim], stride * inner, stride, *self.strides[dim + 1 :]))


@dataclass(frozen=True)
class _Copy:
    """A box of a new storage holds what a box of an older one held, index by index."""

    target: _Box
    source: _Box
    storage: int

    def digits(self, position: int) -> tuple[int, ...] | None:
        """Index in the box of a distance in the target storage, None when it is not a sum of its strides."""
        order = sorted(range(len(self.target.sizes)), key=lambda d: -self.target.strides[d])
        found = [0] * len(order)
        for dim in order:
            if self.target.sizes[dim] > 1:
                found[dim], position = divmod(position, self.target.strides[dim])
        return None if position else tuple(found)

    def steps_inside(self, last: list[int], step: tuple[int, ...] | None, stride: int, size: int) -> int:
        """How many of `size` steps of `stride` stay in the box, from the index `last` on. At least 1."""
        if step is None:  # finer than the box
            gap = min(
                (s for s, size in zip(self.target.strides, self.target.sizes, strict=True) if size > 1), default=1
            )
            return gap // stride if gap % stride == 0 and size > gap // stride else 1
        room = [1 + (n - 1 - a) // b for a, b, n in zip(last, step, self.target.sizes, strict=True) if b]
        return min(room) if room else size

    def holds(self, position: int) -> bool:
        """Whether a position of the target storage lies in the box."""
        index = self.digits(position - self.target.offset) if position >= self.target.offset else None
        return index is not None and all(i < size for i, size in zip(index, self.target.sizes, strict=True))


class Provenance(TorchDispatchMode):
    """Inside the block, copies of the given meta tensors are followed; then `pieces(tensor)` says what each one holds."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._roots = {_storage(tensor): name for name, tensor in params.items()}
        self._copies: dict[int, list[_Copy]] = {}
        self._keep: list[Any] = list(params.values())  # an id may not be used again for another storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result):
            if not isinstance(out, torch.Tensor):
                continue
            storage = _storage(out)
            if storage not in self._roots and storage not in self._copies:
                self._keep.append(out)
                self._copies[storage] = self._note(func, out, args)
        return result

    def _note(self, func: Any, out: torch.Tensor, args: tuple[Any, ...]) -> list[_Copy]:
        if func in _COPIES:
            parts = [(out if out.shape == args[0].shape else out.view(args[0].shape), args[0])]
        elif func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else 0
            if func is aten.stack.default:
                parts = [(out.select(dim, i), part) for i, part in enumerate(args[0])]
            else:
                parts = list(zip(out.split([part.shape[dim] for part in args[0]], dim), args[0], strict=True))
        else:
            return []
        if any(into.dtype != part.dtype for into, part in parts):
            return []
        return [_Copy(_Box.of(into), _Box.of(part), _storage(part)) for into, part in parts]

    def pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """The boxes of parameters that make up `tensor` in row-major order. Raises `UntraceableError`."""
        found: list[Piece] = []
        self._resolve(_Box.of(tensor), _storage(tensor), _Box.dense(tuple(tensor.shape)), found)
        return tuple(found)

    def _resolve(self, view: _Box, storage: int, target: _Box, found: list[Piece]) -> None:
        """Add the pieces of `view`, a box of `storage`, which goes index by index into `target`."""
        if len(found) > MAX_PIECES:
            raise UntraceableError
        if storage in self._roots:
            piece = Piece(self._roots[storage], view.sizes, view.offset, view.strides, target.offset, target.strides)
            found.append(piece.merged())
            return
        copy = next((c for c in self._copies.get(storage, ()) if c.holds(view.offset)), None)
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
                # Leaves the box: either for another copy, or around the end of a dimension.
                if inside > 1 and size % inside == 0:
                    self._resolve(view.fold(dim, inside), storage, target.fold(dim, inside), found)
                else:
                    for begin, end in ((0, inside), (inside, size)):
                        part = (dim, begin, end - begin)
                        self._resolve(view.cut(*part), storage, target.cut(*part), found)
                return
            assert step is not None
            last = [a + (size - 1) * b for a, b in zip(last, step, strict=True)]
            source_strides.append(sum(b * s for b, s in zip(step, copy.source.strides, strict=True)))
        offset = copy.source.offset + sum(a * s for a, s in zip(start, copy.source.strides, strict=True))
        self._resolve(_Box(view.sizes, offset, tuple(source_strides)), copy.storage, target, found)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
