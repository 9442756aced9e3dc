"""A method of a library's class that is replaced while somebody wants that, and is the library's own otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["StockHook"]


class StockHook:
    """`owner.name` calls `instead` between the first `begin` and the last `end`. Local to this process."""

    def __init__(self, owner: type, name: str, instead: Callable[..., object], kind: type) -> None:
        """`kind`: `staticmethod` or `classmethod`, as the method is declared."""
        self._owner, self._name, self._instead, self._kind = owner, name, instead, kind
        self._declared: Any = None
        self._wrapped = False
        self.users = 0
        """How many want the replacement now."""

    @property
    def stock(self) -> Callable[..., Any]:
        """The library's function, without its binding."""
        function: Callable[..., Any] = self._declared.__func__
        return function

    def begin(self) -> None:
        """One more wants it."""
        if self.users == 0 and not self._wrapped:
            self._declared = self._owner.__dict__[self._name]
            setattr(self._owner, self._name, self._kind(self._instead))
        self.users += 1

    def end(self) -> None:
        """One less wants it. If other code has wrapped the replacement meanwhile, that stays and calls the stock method."""
        self.users -= 1
        if self.users == 0:
            self._wrapped = getattr(self._owner.__dict__[self._name], "__func__", None) is not self._instead
            if not self._wrapped:
                setattr(self._owner, self._name, self._declared)

    def while_alive(self, owner: object) -> None:
        """Replace until `owner` (training arguments, an accelerator) is garbage-collected."""
        self.begin()
        weakref.finalize(owner, self.end).atexit = False
