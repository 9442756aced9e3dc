"""Makes `inspect.signature` show the stock arguments for overrides that take `*args`, because libraries check them."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["show_stock", "with_keyword"]

_PASSED_ON = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def show_stock(ours: type, stock: type) -> None:
    """Methods of `ours` that take `*args` or `**kwargs` instead of the arguments of `stock` show the signature of `stock`.

    `ours` may be a mixin. Its bases within this package are covered as well.
    """
    for cls in ours.__mro__:
        if not cls.__module__.startswith("hf_dist."):
            continue
        for name, method in vars(cls).items():
            base = getattr(stock, name, None)
            if name == "__init__" or not inspect.isfunction(method) or not inspect.isfunction(base):
                continue
            there = inspect.signature(base)
            if _names(inspect.signature(method)) != _names(there):
                shown: Any = method
                shown.__signature__ = there


def with_keyword(stock: type, name: str, ours: type) -> inspect.Signature:
    """The signature of `stock(...)` plus the keyword `name`, placed before `**kwargs` if there is one."""
    theirs = inspect.signature(stock.__init__)  # type: ignore[misc]
    own = inspect.signature(ours.__init__).parameters[name]  # type: ignore[misc]
    named = [p for p in theirs.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in theirs.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return theirs.replace(parameters=[*named, own, *rest])


def _names(signature: inspect.Signature) -> list[str]:
    return [name for name, p in signature.parameters.items() if p.kind not in _PASSED_ON]
