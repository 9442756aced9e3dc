"""Intercepts the calls of chosen modules, including their hooks, without changing their forward, name or parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Handler", "fix_property", "intercept"]

Handler = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""`handler(call, args, kwargs)` returns the result; `call(*args, **kwargs)` is the module's own call."""

_HANDLER = "_hf_dist_call_handler"


def intercept(module: nn.Module, handler: Handler) -> None:
    """Make `handler` answer the calls of `module` from now on. Local.

    Python looks up `__call__` on the class, so the module gets a subclass of its class. If the handler does not pass a call on,
    the module's hooks do not run (no weights are gathered, no outputs collected). Activation checkpointing inside the module's
    `forward` is not affected.
    """
    cls: object = type(module)
    module.__class__ = _callable_class(cls)
    module.__dict__[_HANDLER] = handler


@functools.cache
def _callable_class(cls: Any) -> type[nn.Module]:
    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        return self.__dict__[_HANDLER](functools.partial(cls.__call__, self), args, kwargs)

    return _subclass(cls, {"__call__": call})


def fix_property(module: nn.Module, name: str, answer: Callable[[], object]) -> None:
    """Make the property `name` of this one module return `answer()`. Local."""
    module.__class__ = _subclass(type(module), {name: property(lambda self: answer())})


def _subclass(cls: type[nn.Module], members: dict[str, object]) -> type[nn.Module]:
    # Keep the name: models look up classes by it (`_no_split_modules`, registries keyed on str(class)).
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, **members})
