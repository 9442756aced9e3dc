"""Stand-ins for stacked weights, (..., m, n): a forward finds one in the place of a parameter, and its products are another's.

The class's own forward runs, with all its flags. What a stand-in does not know computes with the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["StackStandIn", "in_place_of", "is_grouped"]

_GROUPED = tuple(
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)
_FALLBACK = "grouped_mm_fallback"
"""The operator of transformers for dtypes and versions without such a kernel."""
_ABSENT = object()


def is_grouped(function: object) -> bool:
    """Whether `function` is a grouped product: of sorted rows, (E, k, n) weights, and the ends of the groups of rows."""
    return function in _GROUPED or getattr(function, "__name__", "") == _FALLBACK


class StackStandIn:
    """Weights of all or some experts, (..., m, n), or what stands for them. Subclasses say what products with them are."""

    base: Any
    """The weights, or another stand-in for them."""

    def __getattr__(self, name: str) -> Any:
        # Shape, dtype, device and other attributes that are not operations.
        return getattr(self.base, name)

    def over(self, base: Any) -> StackStandIn:
        """The same over another `base`."""
        raise NotImplementedError

    def swapped(self) -> StackStandIn:
        """Each matrix transposed; nothing is multiplied out."""
        raise NotImplementedError

    def plain(self) -> torch.Tensor:
        """The weights that this stands for."""
        raise NotImplementedError

    def transpose(self, first: int, second: int) -> StackStandIn | torch.Tensor:
        """Transpose the matrices. Any other transposition returns plain weights."""
        dims = self.base.dim()
        if {first % dims, second % dims} != {dims - 2, dims - 1}:
            return self.plain().transpose(first, second)
        return self.swapped()

    @property
    def mT(self) -> StackStandIn:
        """Each matrix of the stack transposed: the last two dimensions change places."""
        return self.swapped()

    @property
    def T(self) -> StackStandIn | torch.Tensor:
        """The transpose of one matrix; of a stack, as torch reverses all dimensions, plain weights."""
        return self.swapped() if self.base.dim() == 2 else self.plain().T

    def t(self) -> StackStandIn | torch.Tensor:
        """The same as `T`."""
        return self.T

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        return func(*map(_plain, args), **{key: _plain(value) for key, value in (kwargs or {}).items()})


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.plain() if isinstance(value, StackStandIn) else value


@contextmanager
def in_place_of(module: nn.Module, stacks: Mapping[str, StackStandIn]) -> Iterator[None]:
    """Inside, `stacks` hide attributes of `module`: entries in a module's own dict take precedence over its parameters."""
    before = {name: module.__dict__.get(name, _ABSENT) for name in stacks}
    module.__dict__.update(stacks)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
