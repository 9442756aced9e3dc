"""Shows the stock arguments for overrides that take `*args`: to `inspect.signature`, which libraries ask, and to editors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

__all__ = ["show_stock", "with_config"]

_P = ParamSpec("_P")
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


class _WithConfig(Protocol[_P]):
    """What an editor shows: the stock call, and the one with a config, whose other arguments are the same."""

    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> None: ...
    @overload
    def __call__(
        self, *args: Any, dist_config: str | os.PathLike[str] | Mapping[str, object] | None, **kwargs: Any
    ) -> None: ...


def with_config(
    stock: Callable[Concatenate[Any, _P], None],
) -> Callable[[Callable[..., None]], _WithConfig[_P]]:
    """Decorator of an `__init__` that takes `dist_config` and the arguments of `stock`: it shows the arguments of both."""

    def shows_both(ours: Callable[..., None]) -> _WithConfig[_P]:
        theirs = inspect.signature(stock)
        own = inspect.signature(ours).parameters["dist_config"]
        named = [p for p in theirs.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in theirs.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        shown: Any = ours
        shown.__signature__ = theirs.replace(parameters=[*named, own, *rest])
        return cast("_WithConfig[_P]", ours)

    return shows_both


def _names(signature: inspect.Signature) -> list[str]:
    return [name for name, p in signature.parameters.items() if p.kind not in _PASSED_ON]
