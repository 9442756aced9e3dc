"""Decisions of a checkpointed call that its recomputation must take over.

What a block chooses by comparing numbers (which experts a token goes to) may come out differently when it is recomputed, by a
near-tie, and then shapes do not fit, on several ranks not even the collectives. `kept(make)` makes the decision in the
first run, and answers with it in the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Tape", "kept"]

T = TypeVar("T")
_running: Tape | None = None
"""Of the process, not of a thread: on a GPU autograd recomputes on a thread of its own, while this one waits."""


class Tape:
    """The decisions of one checkpointed call, in their order."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._position = 0

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`function(*args, **kwargs)`: the first time decisions are kept, after that they are given back."""
        global _running
        before, _running = _running, self
        self._position = 0
        try:
            return function(*args, **kwargs)
        finally:
            _running = before

    def next(self, make: Callable[[], T]) -> T:
        """The decision that is due."""
        if self._position == len(self._kept):
            self._kept.append(make())
        self._position += 1
        value: T = self._kept[self._position - 1]
        return value


def kept(make: Callable[[], T]) -> T:
    """`make()`, or what it gave when the call under way ran first."""
    return make() if _running is None else _running.next(make)
