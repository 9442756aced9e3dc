"""What the host of one rank asked of its GPU, in the order in which it asked: plain data, which other files read.

    launched    a kernel, a copy or a collective was put into a stream
    ordered     a stream was told to wait for a point of another one
    blocked     the host waited for points of streams
    freed       memory went back to the allocator of the stream that it was allocated on

A point is (stream, how many entries it had by then). Nothing of it says when anything ran: `order.py` asks what may run at the
same time, `timing.py` how long it takes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

HOST = "host"
"""The stream of what the processor itself reads and writes."""
COMPUTE = "compute"
"""The stream that is current unless somebody chooses another one."""
Point = tuple[str, int]


@dataclass(slots=True)
class Transfer:
    """What a launched collective, send or receive needs of other ranks."""

    communicator: str
    """The same text on every rank that is in it."""
    ranks: tuple[int, ...]
    """Global numbers of its ranks."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast, send, receive."""
    nbytes: int
    """Of the whole tensor."""


@dataclass(slots=True)
class Launched:
    """Something in a stream."""

    stream: str
    what: str
    reads: tuple[int, ...]
    """Blocks of memory."""
    writes: tuple[int, ...]
    where: str
    seconds: float = 0.0
    transfer: Transfer | None = None


@dataclass(slots=True)
class Ordered:
    """`stream` goes on when `point` is reached."""

    stream: str
    point: Point


@dataclass(slots=True)
class Blocked:
    """The host goes on when `points` are reached."""

    points: tuple[Point, ...]
    why: str
    where: str


@dataclass(slots=True)
class Freed:
    """The allocator may hand `block` out again to the next user of `home`."""

    block: int
    home: str
    where: str


Entry = Launched | Ordered | Blocked | Freed


@dataclass
class Trace:
    """All entries of one rank."""

    rank: int = 0
    entries: list[Entry] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Name -> number of entries when somebody said so, such as the beginning of a step."""
    _length: dict[str, int] = field(default_factory=dict)

    def launch(self, stream: str, what: str, where: str, **more: Any) -> Point:
        """Put something into `stream`; the point that is reached when it is done."""
        self.entries.append(Launched(stream, what, where=where, **more))
        return self._extend(stream)

    def order(self, stream: str, point: Point) -> None:
        """Let `stream` wait for `point`."""
        if stream != point[0] and point[1]:
            self.entries.append(Ordered(stream, point))
            self._extend(stream)

    def block(self, points: tuple[Point, ...], why: str, where: str) -> None:
        """The host waits."""
        self.entries.append(Blocked(points, why, where))

    def free(self, block: int, home: str, where: str) -> None:
        """Memory is given back."""
        self.entries.append(Freed(block, home, where))

    def point(self, stream: str) -> Point:
        """What `stream` has been given so far."""
        return stream, self._length.get(stream, 0)

    def everything(self) -> tuple[Point, ...]:
        """What the GPU has been given so far."""
        return tuple((stream, length) for stream, length in self._length.items() if stream != HOST)

    def mark(self, name: str) -> None:
        """Remember this place."""
        self.marks[name] = len(self.entries)

    def _extend(self, stream: str) -> Point:
        self._length[stream] = self._length.get(stream, 0) + 1
        return stream, self._length[stream]

    def waits(self, since: str) -> list[Blocked]:
        """When the host waited, from a mark on, for something that was begun after it."""
        begun = Counter(e.stream for e in self.entries[: self.marks[since]] if isinstance(e, Launched | Ordered))
        later = [e for e in self.entries[self.marks[since] :] if isinstance(e, Blocked)]
        return [e for e in later if any(length > begun[stream] for stream, length in e.points)]
