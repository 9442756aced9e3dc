"""`p.grad` and `p.data` of a trainable parameter whose model is prepared.

The gradient that will be stepped is in a flat buffer, not in `.grad`, so a loop that reads, scales or clears `p.grad` must be
redirected. Writes through `p.data` leave no trace, but the step must know of them: it would overwrite them from wider master
weights. So the parameter object gets a subclass with these two properties. Object, name, shape and dtype stay. Autograd and
operators bypass the properties.
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
        """The value of `p.grad`."""

    def set_gradient(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """Implement `p.grad = value`."""

    def whole(self, param: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the gradient, in the shape of the parameter."""

    def to_combine(self) -> list[Any]:
        """The combinations that these gradients still await at the end of the window."""

    def adopt(self) -> None:
        """Add gradients that user code assigned to `.grad` to the window."""


class Writes(Protocol):
    """What `prepare`d parameters tell of user code (`user_writes.py`)."""

    def note_alias(self, alias: torch.Tensor) -> None:
        """User code has read `p.data`."""

    def note_assignment(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """User code sets `p.data = value` of this parameter now."""


class GradientOwner(Protocol):
    """The holder of prepared parameters' gradients and weights."""

    access: GradientAccess | None

    @property
    def writes(self) -> Writes:
        """Told when user code has read `p.data` and may write into it, or has set it."""


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Autograd's own `.grad`. Local."""
    return cast("torch.Tensor | None", _GRAD.__get__(param))


def set_raw_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set autograd's own `.grad`. Local."""
    _GRAD.__set__(param, value)


def forget_gradients(module: nn.Module) -> None:
    """Set autograd's own `.grad` of every parameter of `module` to None, bypassing the properties. Local."""
    with torch._C.DisableTorchFunctionSubclass():  # reads an attribute of freed parameters too
        for param in module.parameters():
            if _GRAD.__get__(param) is not None:
                _GRAD.__set__(param, None)


def raw_data(param: torch.Tensor) -> torch.Tensor:
    """`.data` for our own code, whose writes need no notice."""
    return cast(torch.Tensor, _DATA.__get__(param))


def set_raw_data(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set `.data` for our own code."""
    _DATA.__set__(param, value)


def _owner(param: object) -> GradientOwner | None:
    reference = getattr(param, OWNER, None)
    return None if reference is None else reference[0]()


def _access(param: object) -> GradientAccess | None:
    if TracingContext.try_get() is not None or torch._C._len_torch_dispatch_stack():
        return None  # a compiler is tracing the parameter; no user code is reading its gradient
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
        alias = raw_data(cast(Any, self))
        owner = _owner(self)
        if owner is not None:  # noted last: the read may have waited for weights, which forgets earlier notes
            setattr(alias, OWNER, getattr(self, OWNER))
            owner.writes.note_alias(alias)
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        owner = _owner(self)
        if owner is not None:  # first, while the parameter still is where earlier reads of it are
            owner.writes.note_assignment(cast(Any, self), value)
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = own_class(type(self))
        return copied


@functools.cache
def _twin(cls: type) -> type:
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__, "_hf_dist_unprepared": cls}
    return type(cls)(cls.__name__, (_Prepared, cls), body)


def prepare(param: nn.Parameter) -> None:
    """Give `param` the properties; a no-op if it has them. Its owner must have been set. Local."""
    if not isinstance(param, _Prepared):
        param.__class__ = _twin(type(param))


def own_class(cls: type) -> type:
    """The class that a parameter of class `cls` was created with. Local."""
    return cls._hf_dist_unprepared if issubclass(cls, _Prepared) else cls  # type: ignore[attr-defined]


def unprepare(param: nn.Parameter) -> None:
    """Restore the class that `param` was created with. Local."""
    if isinstance(param, _Prepared):
        param.__class__ = own_class(type(param))
