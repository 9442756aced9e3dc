"""What `p.grad` and `p.data` of a trainable parameter answer once its model is prepared.

The gradient that will be stepped lies in a flat buffer, not in `.grad`; a loop that reads, scales or clears `p.grad` has to
reach it there. And weights that are written through `p.data` change without a trace: the step must know, or it would undo
the change where it keeps wider copies of them. The class of the parameter object is a subclass with these two properties;
object, name, shape and dtype stay, and neither autograd nor an operator goes through the properties.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._guards import TracingContext

OWNER = "_hf_dist_owner"

_GRAD: Any = torch._C.TensorBase.grad
_DATA: Any = torch._C.TensorBase.data


class GradientAccess(Protocol):
    """Reads and writes gradients of prepared parameters."""

    def gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """What `p.grad` is."""

    def set_gradient(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """`p.grad = value`."""

    def whole(self, param: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the gradient, in the shape of the parameter."""

    def to_combine(self) -> list[Any]:
        """What the end of the window still does to them."""

    def adopt(self) -> None:
        """Take what user code has put on `.grad`."""


class Owner(Protocol):
    """Who holds the gradients and weights of prepared parameters."""

    access: GradientAccess | None

    def data_was_read(self) -> None:
        """Somebody has `p.data`, and may write into it."""


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """`.grad` as autograd keeps it."""
    return cast("torch.Tensor | None", _GRAD.__get__(param))


def set_raw_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set `.grad` as autograd keeps it."""
    _GRAD.__set__(param, value)


def forget_gradients(module: nn.Module) -> None:
    """`.grad` of every parameter of `module` becomes None, without a look at what their properties say."""
    with torch._C.DisableTorchFunctionSubclass():  # freed parameters are asked, too
        for param in module.parameters():
            if _GRAD.__get__(param) is not None:
                _GRAD.__set__(param, None)


def raw_data(param: torch.Tensor) -> torch.Tensor:
    """`.data` for our own code, which writes nothing behind anybody's back."""
    return cast(torch.Tensor, _DATA.__get__(param))


def set_raw_data(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set `.data` for our own code."""
    _DATA.__set__(param, value)


def _owner(param: Any) -> Owner | None:
    reference = getattr(param, OWNER, None)
    return None if reference is None else reference[0]()


def _access(param: Any) -> GradientAccess | None:
    if TracingContext.try_get() is not None or torch._C._len_torch_dispatch_stack():
        return None  # a compiler looks at the parameter, not a loop at its gradient
    owner = _owner(param)
    return None if owner is None else owner.access


class _Prepared:
    """The properties that `prepare` mixes into the class of a parameter."""

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's view of the gradient that will be stepped."""
        access = _access(self)
        return raw_grad(cast(Any, self)) if access is None else access.gradient_of(cast(Any, self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        access = _access(self)
        if access is None:
            set_raw_grad(cast(Any, self), value)
        else:
            access.set_gradient(cast(Any, self), value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The elements, without autograd."""
        owner = _owner(self)
        if owner is not None:
            owner.data_was_read()
        return raw_data(cast(Any, self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        owner = _owner(self)
        if owner is not None:
            owner.data_was_read()
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = type(self)._hf_dist_unprepared  # type: ignore[attr-defined]
        return copied


@functools.cache
def _twin(cls: type) -> type:
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__, "_hf_dist_unprepared": cls}
    return type(cls)(cls.__name__, (_Prepared, cls), body)


def prepare(param: nn.Parameter) -> None:
    """Give `param` the properties; its owner must have been set. Nothing happens to one that has them."""
    if not isinstance(param, _Prepared):
        param.__class__ = _twin(type(param))


def unprepare(param: nn.Parameter) -> None:
    """Give `param` the class back that it was made with."""
    if isinstance(param, _Prepared):
        param.__class__ = type(param)._hf_dist_unprepared  # type: ignore[attr-defined]
