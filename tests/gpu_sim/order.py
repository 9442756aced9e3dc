"""What may run at the same time and must not, by vector clocks over a trace.

A clock says, stream by stream, how many entries are known to be done. A stream's own clock grows with its entries; waiting for
a point takes over the clock that the other stream had there; a launch comes after all that the host knows to be done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.gpu_sim.trace import HOST, Blocked, Freed, Launched, Ordered, Point, Trace

Clock = dict[str, int]


@dataclass(frozen=True)
class Fault:
    """Two uses of one block of memory that nothing orders."""

    kind: str
    """race, or early free."""
    later: str
    """What came second on the host: what it is, its stream and line."""
    earlier: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.later} is not ordered after {self.earlier}"


@dataclass(slots=True)
class _Use:
    stream: str
    number: int
    text: str


@dataclass
class _Block:
    write: _Use | None = None
    reads: dict[str, _Use] = field(default_factory=dict)

    def uses(self, *, reads: bool) -> Iterable[_Use]:
        if self.write is not None:
            yield self.write
        if reads:
            yield from self.reads.values()


class _Clocks:
    def __init__(self) -> None:
        self.now: dict[str, Clock] = {HOST: {}}
        self._at: dict[Point, Clock] = {}
        self._length: dict[str, int] = {}

    def advance(self, stream: str) -> int:
        """One more entry in `stream`, issued by the host as it is now; its number."""
        clock = self.now.setdefault(stream, {})
        if stream != HOST:
            _join(clock, self.now[HOST])
        number = self._length[stream] = self._length.get(stream, 0) + 1
        clock[stream] = number
        return number

    def keep(self, stream: str) -> None:
        """Others may wait for this point."""
        if stream != HOST:
            self._at[stream, self._length[stream]] = dict(self.now[stream])

    def reach(self, stream: str, point: Point) -> None:
        """What comes next in `stream` is after `point`."""
        _join(self.now.setdefault(stream, {}), self._at.get(point, {}))

    def knows(self, stream: str, use: _Use) -> bool:
        return self.now.get(stream, {}).get(use.stream, 0) >= use.number


def _join(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > into.get(stream, 0):
            into[stream] = number


def faults(trace: Trace) -> list[Fault]:
    """Races and early frees, each once, in the order in which the host comes upon them."""
    clocks, blocks, found = _Clocks(), dict[int, _Block](), dict[Fault, None]()
    for entry in trace.entries:
        if isinstance(entry, Launched):
            number = clocks.advance(entry.stream)
            use = _Use(entry.stream, number, f"{entry.what} in stream {entry.stream} at {entry.where}")
            for block, writes in [(b, True) for b in entry.writes] + [(b, False) for b in entry.reads]:
                state = blocks.setdefault(block, _Block())
                for other in state.uses(reads=writes):
                    if other is not use and not clocks.knows(entry.stream, other):
                        found[Fault("race", use.text, other.text)] = None
                if writes:
                    state.write, state.reads = use, {}
                else:
                    state.reads[entry.stream] = use
            clocks.keep(entry.stream)
        elif isinstance(entry, Ordered):
            clocks.advance(entry.stream)
            clocks.reach(entry.stream, entry.point)
            clocks.keep(entry.stream)
        elif isinstance(entry, Blocked):
            for point in entry.points:
                clocks.reach(HOST, point)
        else:
            _give_back(entry, clocks, blocks, found)
    return list(found)


def _give_back(entry: Freed, clocks: _Clocks, blocks: dict[int, _Block], found: dict[Fault, None]) -> None:
    """The next owner launches on the stream at home: all that others do with the memory has to be over by then."""
    state = blocks.pop(entry.block, _Block())
    for use in state.uses(reads=True):
        if use.stream != entry.home and not clocks.knows(entry.home, use) and not clocks.knows(HOST, use):
            found[Fault("early free", f"giving memory of stream {entry.home} back at {entry.where}", use.text)] = None
