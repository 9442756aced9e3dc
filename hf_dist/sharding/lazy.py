"""Lazy parameters: their elements stay in a file, and only the elements that are needed are read, when they are needed.

A lazy parameter is a CPU `nn.Parameter` of full shape and final dtype with an empty storage and the guarded class (`guard.py`).
It answers metadata. The first operation that reads or writes elements fills this one parameter in place and makes it ordinary.
Sharding reads only this rank's interval from the source and never fills the parameter.
"""

from __future__ import annotations

import math
import weakref
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from hf_dist.sharding.guard import LAZY, guard, release
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.param_slice import HELD
from hf_dist.tensors.tensor_slice import TensorSlice

CHUNK_NUMEL = 1 << 20
"""Elements read from a file at a time when their dtype is converted."""


@runtime_checkable
class WeightSource(Protocol):
    """Provides the elements of one parameter. Local: reading needs no other rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """The parameter's dtype. Elements are rounded to it, whatever dtype they are stored in or read into."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, stop - start elements, any dtype and device) with elements [start, stop) of the flattened
        parameter. Raises `CheckpointError` naming the file if it is gone or has changed since it was opened."""

    def fingerprint(self) -> str:
        """A string that is equal on two ranks when they read the same elements from the same data."""

    def sample(self, indices: list[int]) -> torch.Tensor:
        """The elements at `indices` (1-D, `dtype`), read by a route independent of `read`, to check it."""

    def sliced(self, held: TensorSlice) -> WeightSource:
        """The source of one slice of the parameter; its indices count the slice's elements."""


class LazyWeight:
    """Fills a lazy parameter, or an alias of it (`.data`, `.detach()`), when it is read."""

    def __init__(self, stored: WeightSource, name: str, held: TensorSlice | None = None) -> None:
        """`stored`: source of the whole parameter; `held`: the slice that the lazy parameter holds (None: all)."""
        self.stored = stored
        self.source = stored if held is None else stored.sliced(held)
        self.name = name
        self._held = held
        self._param: weakref.ref[nn.Parameter] | None = None

    def parameter(self, *, requires_grad: bool = True) -> nn.Parameter:
        """A new lazy parameter with the same source. Local."""
        param = nn.Parameter(self._without_memory(), requires_grad=requires_grad)
        LazyWeight(self.stored, self.name, self._held)._attach(param)
        return param

    def cut(self, param: nn.Parameter, held: TensorSlice) -> None:
        """Make `param`, the parameter of this object, the slice `held` of its stored parameter. Local; reads nothing."""
        lazy = LazyWeight(self.stored, self.name, held)
        param.data = lazy._without_memory()  # releases it
        lazy._attach(param)

    def _without_memory(self) -> torch.Tensor:
        data = torch.empty(self.source.shape, dtype=self.source.dtype)
        data.untyped_storage().resize_(0)
        return data

    def _attach(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)
        setattr(param, LAZY, self)
        if self._held is not None:
            setattr(param, HELD, self._held)
        guard(param)

    def materialize(self, tensor: torch.Tensor) -> None:
        """Fill the storage that the parameter and its alias `tensor` share, and make both ordinary. Local."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            storage, numel = tensor.untyped_storage(), tensor.numel()
            if numel and storage.nbytes() == 0:
                storage.resize_(numel * tensor.element_size())
                try:
                    self.source.read(0, numel, torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (numel,), (1,)))
                except BaseException:
                    storage.resize_(0)  # stay lazy: a second read must not find a half-filled storage
                    raise
        param = self._param() if self._param is not None else None
        for each in (tensor, param):
            if each is not None and getattr(each, LAZY, None) is self:
                release(each)

    def equal(self, other: LazyWeight) -> bool:
        """`torch.equal` for two lazy parameters, in chunks. Nothing is read if both have the same elements of the same file."""
        a, b = self.source, other.source
        if a.shape != b.shape or a.fingerprint() == b.fingerprint():
            return a.shape == b.shape
        numel = math.prod(a.shape)
        for start in range(0, numel, CHUNK_NUMEL):
            count = min(CHUNK_NUMEL, numel - start)
            left, right = torch.empty(count, dtype=a.dtype), torch.empty(count, dtype=b.dtype)
            a.read(start, start + count, left)
            b.read(start, start + count, right)
            if not torch.equal(left, right):
                return False
        return True


def lazy_source(tensor: torch.Tensor) -> WeightSource | None:
    """The source of a lazy parameter, in the parameter's own shape; None for an ordinary one. Local."""
    lazy: LazyWeight | None = getattr(tensor, LAZY, None)
    return None if lazy is None else lazy.source


def lazy_sources(model: nn.Module) -> dict[str, WeightSource]:
    """Sources of the lazy parameters of `model`, by name, each parameter once; of whole parameters even if cut. Local."""
    return {name: getattr(p, LAZY).stored for name, p in model.named_parameters() if hasattr(p, LAZY)}


def materialize(model: nn.Module) -> None:
    """Fill every parameter that is still lazy. Local."""
    for p in model.parameters():
        lazy: LazyWeight | None = getattr(p, LAZY, None)
        if lazy is not None:
            lazy.materialize(p)


def read_overlap(target: torch.Tensor, target_start: int, source: WeightSource, slot: ParamSlot) -> None:
    """Read only the part of the lazy parameter in `slot` that falls into `target`'s interval."""
    first = max(target_start, slot.offset)
    last = min(target_start + target.numel(), slot.stop)
    if first < last:
        source.read(first - slot.offset, last - slot.offset, target[first - target_start : last - target_start])


def copy_overlap(target: torch.Tensor, target_start: int, source: torch.Tensor, source_start: int) -> None:
    """Copy the part of `source` (its flat interval starts at `source_start`) that falls into `target`'s interval."""
    first = max(target_start, source_start)
    last = min(target_start + target.numel(), source_start + source.numel())
    if first < last:
        target[first - target_start : last - target_start].copy_(source[first - source_start : last - source_start])
