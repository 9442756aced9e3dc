"""Records decisions of a checkpointed call, so that its recomputation makes the same ones.

A choice made by comparing numbers (the experts of a token) can differ in the recomputation if there is a near-tie. Then shapes
do not match and, on several ranks, neither do the collectives. `kept(make)` makes the decision in the first run and replays it
in later runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Tape", "kept"]

T = TypeVar("T")
_running: Tape | None = None
"""One per process, not per thread: on a GPU, autograd recomputes on its own thread while the main thread waits."""


class Tape:
    """The decisions of one checkpointed call, in order."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._position = 0

    def call(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run `function(*args, **kwargs)`: the first run records decisions, later runs replay them."""
        global _running
        before, _running = _running, self
        self._position = 0
        try:
            return function(*args, **kwargs)
        finally:
            _running = before

    def next(self, make: Callable[[], T]) -> T:
        """The next decision: replayed, or made and recorded if the recording ends here."""
        if self._position == len(self._made):
            self._made.append(make())
        self._position += 1
        value: T = self._made[self._position - 1]
        return value


def kept(make: Callable[[], T]) -> T:
    """The result of `make()`, replayed if the current checkpointed call is a recomputation. Local."""
    return make() if _running is None else _running.next(make)
