"""The tensors in an optimizer's param groups: one in place of each parameter, on every rank.

A rank steps the elements that it holds of a parameter. The stand-in has those elements, or none on a rank that steps none: so
groups keep their length and order on all ranks, and a list that a class keeps beside `params` still fits. Between steps its
`.grad` is the parameter's, so loops over `optimizer.param_groups` read, scale and clip what `model.parameters()` would show.
Attributes that user code has set on the parameter are found on the stand-in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.gradient_shard import GradientShard
from hf_dist.sharding.param_slice import held_slice
from hf_dist.sharding.prepared import OWNER, raw_data, raw_grad, set_raw_data, set_raw_grad

__all__ = ["OwnCalls", "StandIn", "lend", "point_at"]


class OwnCalls:
    """Whether the engine itself is calling the optimizer, rather than user code."""

    def __init__(self) -> None:
        self.running = False

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the calls inside the block. Local."""
        before, self.running = self.running, True
        try:
            yield
        finally:
            self.running = before


class StandIn(nn.Parameter):
    """What an optimizer steps in place of a model's parameter."""

    _parameter: nn.Parameter
    _calls: OwnCalls
    is_stepped: bool
    """Whether this rank steps elements of the parameter."""

    @staticmethod
    def of(parameter: nn.Parameter, values: torch.Tensor, calls: OwnCalls, is_stepped: bool = True) -> StandIn:
        """A stand-in of `parameter` with these elements. Local."""
        made: Any = nn.Parameter(values.detach(), requires_grad=True)
        kind: object = type(made)
        made.__class__ = _of_class(kind)
        made._parameter, made._calls, made.is_stepped = parameter, calls, is_stepped
        return cast(StandIn, made)

    @property
    def grad(self) -> torch.Tensor | None:
        """What was lent for a step; outside of one the parameter's gradient, 1-D like the elements; None without any."""
        lent = raw_grad(self)
        if lent is not None or self._calls.running:
            return lent
        grad = self._parameter.grad
        same = grad is None or isinstance(grad, GradientShard) or grad.dim() == self.dim()
        return grad if same else cast(torch.Tensor, grad).reshape(-1)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._calls.running:
            set_raw_grad(self, value)
        elif value is None or isinstance(value, GradientShard) or value.numel() != self._parameter.numel():
            self._parameter.grad = value
        else:
            self._parameter.grad = value.reshape(self._parameter.shape)

    @grad.deleter
    def grad(self) -> None:
        """Like `grad = None`."""
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The elements, without autograd. Raises `ModelError` outside of a step if they are not all."""
        self._refuse_part("data")
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `p.data = p.data - update`, as some classes write it: the elements stay where the weights are.
        with torch.no_grad():
            self.copy_(value)

    def detach(self) -> torch.Tensor:
        """Like `data`."""
        self._refuse_part("detach()")
        return torch.Tensor.detach(self)

    def norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like torch's. Raises `ModelError` outside of a step if this rank has not all elements."""
        self._refuse_part("norm()")
        norm: torch.Tensor = torch.Tensor.norm(self, *args, **kwargs)
        return norm

    def numel(self) -> int:
        """In a step, of this rank's elements; else of the whole parameter, as loops that count parameters expect."""
        return torch.Tensor.numel(self) if self._calls.running else full_numel(self._parameter)

    nelement = numel

    def _refuse_part(self, what: str) -> None:
        held, everything = torch.Tensor.numel(self), full_numel(self._parameter)
        if not self._calls.running and held != everything:
            name = getattr(self._parameter, OWNER, (None, "a parameter"))[1]
            raise ModelError(
                f"{what} of {name} in optimizer.param_groups: this rank steps {held} of its {everything} elements. Read "
                "model.parameters(), at ZeRO stage 3 inside `with hf_dist.gathered(model):`"
            )

    def __getattr__(self, name: str) -> object:
        if name.startswith("_hf_dist") or "_parameter" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._parameter, name)


@functools.cache
def _of_class(cls: type) -> type:
    """`StandIn`, or for another kind of tensor (a fake one) a subclass of it that behaves like a stand-in."""
    if cls is nn.Parameter:
        return StandIn
    body = {name: value for name, value in vars(StandIn).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(StandIn.__name__, (cls,), {**body, "__slots__": ()})


def full_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, also of one that is cut along `tp`. Local."""
    return math.prod(held_slice(parameter).whole)


def point_at(tensor: StandIn, values: torch.Tensor) -> None:
    """Let a stand-in have these elements. Local."""
    set_raw_data(tensor, values)


def lend(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a stand-in the gradient that a step reads, or take it back. Local."""
    set_raw_grad(tensor, grad)
