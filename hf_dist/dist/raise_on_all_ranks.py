"""Raises one rank's failure on every rank, so that no rank waits for one that has left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis

__all__ = ["agree", "first_problem", "together", "uninterrupted"]

_DEFERRED = (signal.SIGINT, signal.SIGTERM)
_FIRST = b"hf_dist: interrupted while all ranks save or load together: that is finished first; again: stop at once\n"
_inside = False


def first_problem(axis: MeshAxis, problem: object) -> tuple[int, object, int] | None:
    """(rank on the axis, its problem, number of other ranks with a problem) of the first rank with one, or None. Collective."""
    found = [(rank, p) for rank, p in enumerate(collectives.all_gather_object(axis, problem)) if p]
    return (*found[0], len(found) - 1) if found else None


def agree(axis: MeshAxis, problem: object, error: Callable[[Any], Exception], *, names_rank: bool = False) -> None:
    """Raise `error(problem)` on all ranks, with the problem of the first rank that has one. Collective over `axis`.

    `names_rank`: the problem is a text; prefix it as in `rank 3: ...`.
    """
    first = first_problem(axis, problem)
    if first is None:
        return
    rank, text, others = first
    if names_rank:
        more = f" (and {others} more rank{'s' if others > 1 else ''} failed)" if others else ""
        text = f"rank {rank}: {text}{more}"
    raise error(text)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, a first SIGINT or SIGTERM waits for the end of the block; a second one of its kind does not. Local.

    A handler that raises (Ctrl-C) may do so at any line: in the middle of a collective, which the other ranks then wait for,
    or between two, so that the next one of this rank meets another one of theirs.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _DEFERRED}
    came: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if number in came and callable(handler):
            handler(number, frame)
        elif number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            os.write(2, _FIRST)  # not `print`, which this signal may have interrupted
        came[number] = frame

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, note)
    _inside = True
    try:
        yield
    finally:
        _inside = False
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        for late, frame in came.items():
            handler = handlers[signal.Signals(late)]
            assert callable(handler)
            handler(late, frame)


class together:
    """A block after which all ranks of `axis` raise if one of them failed inside. Collective at its end.

    `explain`: turns this rank's exception into text. `error`: makes the exception from the first failed rank's text. A
    `SystemExit` of the block is also reported to the other ranks, then propagates here; signals wait for the block's end.
    """

    def __init__(self, axis: MeshAxis, explain: Callable[[Exception], str], error: Callable[[str], Exception]) -> None:
        self.axis, self.explain, self.error = axis, explain, error

    def __enter__(self) -> None:
        self._until_the_end = uninterrupted()
        self._until_the_end.__enter__()

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> Literal[False]:
        try:
            return self._agree(raised)
        finally:
            self._until_the_end.__exit__(None, None, None)

    def _agree(self, raised: BaseException | None) -> Literal[False]:
        if raised is not None and not isinstance(raised, Exception):
            first_problem(self.axis, f"it was interrupted ({type(raised).__name__})")
            return False
        try:
            agree(self.axis, None if raised is None else self.explain(raised), self.error, names_rank=True)
        except Exception as error:
            raise error from raised
        return False
