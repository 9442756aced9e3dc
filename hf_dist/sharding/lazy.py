"""A parameter whose elements are still in a file: it is read where, when and as far as it is needed.

It is an ordinary CPU `nn.Parameter` of full shape and final dtype with an empty storage and the guarded class (`guard.py`).
Metadata is answered; whatever reads or writes elements fills this one parameter in place first, and from then on it is an
ordinary one. Sharding takes only this rank's interval from the source and never fills it.
"""

from __future__ import annotations

import math
import weakref
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from hf_dist.boxes import TensorSlice
from hf_dist.sharding.guard import LAZY, guard, release
from hf_dist.sharding.held import HELD

CHUNK_NUMEL = 1 << 20
"""Elements that are in flight between a file and where they go when the dtype changes on the way."""


@runtime_checkable
class WeightSource(Protocol):
    """Where the elements of one parameter come from. Local: reading needs no other rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """The parameter's; elements are rounded through it, whatever the dtype they are stored in or read into."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, stop - start elements, any dtype and device) with elements [start, stop) of the flattened
        parameter. Raises `CheckpointError` naming the file when it is gone or is no longer the one that was planned."""

    def fingerprint(self) -> str:
        """Equal on two ranks when they read the same elements from the same data."""

    def sample(self, indices: list[int]) -> torch.Tensor:
        """These elements (1-D, `dtype`), read in another way than `read` does, to check it."""

    def sliced(self, held: TensorSlice) -> WeightSource:
        """The source of a slice of the parameter, in the slice's own elements."""


class LazyWeight:
    """What a lazy parameter, and every alias of it (`.data`, `.detach()`), asks when it is read."""

    def __init__(self, stored: WeightSource, name: str, held: TensorSlice | None = None) -> None:
        """`stored`: of the whole parameter; `held`: the slice of it that the lazy parameter is (None: all)."""
        self.stored = stored
        self.source = stored if held is None else stored.sliced(held)
        self.name = name
        self._held = held
        self._param: weakref.ref[nn.Parameter] | None = None

    def parameter(self, *, requires_grad: bool = True) -> nn.Parameter:
        """A new lazy parameter over the same elements."""
        param = nn.Parameter(self._without_memory(), requires_grad=requires_grad)
        LazyWeight(self.stored, self.name, self._held)._attach(param)
        return param

    def cut(self, param: nn.Parameter, held: TensorSlice) -> None:
        """Make `param`, which this is about, the slice `held` of its stored parameter; nothing is read."""
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
        """Fill the storage of `tensor` (the parameter or an alias, which share it) and make both ordinary. Local."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            storage, numel = tensor.untyped_storage(), tensor.numel()
            if numel and storage.nbytes() == 0:
                storage.resize_(numel * tensor.element_size())
                try:
                    self.source.read(0, numel, torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (numel,), (1,)))
                except BaseException:
                    storage.resize_(0)  # still lazy: a second read must not find half of the elements
                    raise
        param = self._param() if self._param is not None else None
        for each in (tensor, param):
            if each is not None and getattr(each, LAZY, None) is self:
                release(each)

    def equal(self, other: LazyWeight) -> bool:
        """`torch.equal` of two lazy parameters, in chunks; elements that are the same ones of a file are not read."""
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
    """The source of a parameter that is still lazy, in its own shape; None for an ordinary one."""
    lazy: LazyWeight | None = getattr(tensor, LAZY, None)
    return None if lazy is None else lazy.source


def lazy_sources(model: nn.Module) -> dict[str, WeightSource]:
    """Sources of the parameters of `model` that are still lazy, by name (each parameter once), whole where it was cut."""
    return {name: getattr(p, LAZY).stored for name, p in model.named_parameters() if hasattr(p, LAZY)}


def materialize(model: nn.Module) -> None:
    """Fill every parameter that is still lazy. Local."""
    for p in model.parameters():
        lazy: LazyWeight | None = getattr(p, LAZY, None)
        if lazy is not None:
            lazy.materialize(p)
