"""Records the collectives that this process starts, and the bytes that it sends in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_dist.dist.mesh import MeshAxis

__all__ = ["CommLog", "Sent", "count", "count_start", "num_started", "record", "refused"]


@dataclass(frozen=True)
class Sent:
    """What one rank sent in one collective."""

    op: str
    axis: str
    nbytes: int
    """Bytes this rank sends."""


@dataclass
class CommLog:
    """The collectives recorded inside a `record()` block."""

    entries: list[Sent] = field(default_factory=list)

    def nbytes(self, op: str | None = None) -> int:
        """Bytes sent by this rank, in operation `op` or in all operations."""
        return sum(e.nbytes for e in self.entries if op in (None, e.op))

    def count(self, op: str) -> int:
        """How often `op` ran."""
        return sum(e.op == op for e in self.entries)


_logs: list[CommLog] = []


@contextmanager
def record() -> Iterator[CommLog]:
    """Record every collective that this process starts inside the block. Local."""
    log = CommLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


_num_started = 0
_alone = threading.local()


def num_started() -> int:
    """Number of transfers that this process has started. Two readings show whether the process makes progress."""
    return _num_started


@contextmanager
def refused() -> Iterator[None]:
    """Inside, this thread starts no collective: one that tries gets a RuntimeError. For what one rank does alone."""
    _alone.here = True
    try:
        yield
    finally:
        _alone.here = False


def count_start() -> None:
    """Count one more started transfer."""
    global _num_started
    if getattr(_alone, "here", False):
        raise RuntimeError("a collective was started where this rank is alone")
    _num_started += 1


def count(op: str, axis: MeshAxis, nbytes: int) -> None:
    """Count and record one collective of `nbytes` that this rank sends."""
    count_start()
    for log in _logs:
        log.entries.append(Sent(op, axis.name, nbytes))
