"""When everything runs, of one rank or of several at once: traces replayed over a model of the hardware.

* The host of a rank goes through its entries. A launch takes it no time. It stops where it waits for the GPU, and at the first
  use of a communicator until every simulated rank of it is at its own.
* A stream runs its entries one after the other. Streams share `queues` hardware queues, in which what is not first cannot
  begin before those in front of it have begun.
* A collective begins on each rank when its turn comes there, occupies the GPU from then on, and ends everywhere when the last
  rank has begun and its time is over. So do a send and the receive of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.gpu_sim.trace import COMPUTE, HOST, Blocked, Launched, Ordered, Point, Trace

_MATES = {"send": "receive", "receive": "send"}


@dataclass(slots=True)
class _Running:
    """An entry of a stream."""

    entry: Launched | Ordered
    issued: float
    start: float | None = None
    end: float | None = None


@dataclass
class _Stream:
    entries: list[_Running] = field(default_factory=list)
    done: int = 0  # entries whose end is known


@dataclass
class _Rank:
    trace: Trace
    position: int = 0
    time: float = 0.0
    streams: dict[str, _Stream] = field(default_factory=dict)
    queues: dict[int, list[_Running]] = field(default_factory=lambda: defaultdict(list))
    begun: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # of each queue, how many have begun
    known: set[str] = field(default_factory=set)  # communicators used before
    blocked: str = ""


@dataclass
class Outcome:
    """What the replay has found."""

    hung: list[str]
    """Ranks that never come to their end: where their hosts wait; empty if all do."""
    busy: dict[str, float]
    """Seconds of work by stream, of the first rank, from the mark on."""
    seconds: float
    """From the mark to the end, of the first rank."""
    waiting: int
    """The most transfers that occupied one GPU at a time before the other rank had come, of the same kind of kernel."""

    @property
    def ratio(self) -> float:
        """Seconds over those of the compute stream alone."""
        return self.seconds / self.busy[COMPUTE]


class _Replay:
    def __init__(self, traces: Sequence[Trace], queues: int) -> None:
        self.ranks = {trace.rank: _Rank(trace) for trace in traces}
        self.num_queues = queues
        self.numbers: dict[str, int] = {}
        self.meetings: dict[tuple[str, int], dict[int, _Running]] = defaultdict(dict)
        self.count: dict[tuple[str, str, int], int] = defaultdict(int)
        self.place: dict[int, tuple[str, int]] = {}  # id of what runs -> its meeting

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for number, rank in self.ranks.items():
                moved |= self._host(number, rank)
                moved |= self._device(number, rank)

    # ------------------------------------------------------------------ one host

    def _host(self, number: int, rank: _Rank) -> bool:
        start = rank.position
        entries = rank.trace.entries
        while rank.position < len(entries):
            entry = entries[rank.position]
            if isinstance(entry, Blocked):
                ends = [self._end(rank, point) for point in entry.points]
                if None in ends:
                    rank.blocked = f"rank {number} waits for the GPU: {entry.why} at {entry.where}"
                    break
                rank.time = max([rank.time, *(end for end in ends if end is not None)])
            elif isinstance(entry, Launched | Ordered) and entry.stream != HOST:
                if (
                    isinstance(entry, Launched)
                    and entry.transfer is not None
                    and not self._may_use(number, rank, entry)
                ):
                    break
                self._issue(number, rank, entry)
            rank.position += 1
        else:
            rank.blocked = ""
        return rank.position > start

    def _may_use(self, number: int, rank: _Rank, entry: Launched) -> bool:
        transfer = entry.transfer
        assert transfer is not None
        name = transfer.communicator
        if name in rank.known:
            return True
        others = [r for r in transfer.ranks if r in self.ranks and r != number]
        for other in others:
            there = self.ranks[other]
            if name in there.known:
                continue
            now = there.trace.entries[there.position] if there.position < len(there.trace.entries) else None
            if not (isinstance(now, Launched) and now.transfer is not None and now.transfer.communicator == name):
                rank.blocked = (
                    f"rank {number} waits in the first use of {name} for rank {other}: {entry.what} at {entry.where}"
                )
                return False
        for member in (number, *others):
            self.ranks[member].known.add(name)
        return True

    def _issue(self, number: int, rank: _Rank, entry: Launched | Ordered) -> None:
        running = _Running(entry, rank.time)
        rank.streams.setdefault(entry.stream, _Stream()).entries.append(running)
        rank.queues[self._queue(entry.stream)].append(running)
        if isinstance(entry, Launched) and entry.transfer is not None:
            transfer = entry.transfer
            key = (transfer.communicator, transfer.kind if transfer.kind in _MATES else "", number)
            meeting = (f"{transfer.communicator}{_direction(transfer.kind, number, transfer.ranks)}", self.count[key])
            self.count[key] += 1
            self.meetings[meeting][number] = running
            self.place[id(running)] = meeting

    def _queue(self, stream: str) -> int:
        return self.numbers.setdefault(stream, len(self.numbers)) % self.num_queues

    def _end(self, rank: _Rank, point: Point) -> float | None:
        stream, length = point
        if not length:
            return 0.0
        entries = rank.streams[stream].entries if stream in rank.streams else []
        return entries[length - 1].end if len(entries) >= length else None

    # ---------------------------------------------------------------- one device

    def _device(self, number: int, rank: _Rank) -> bool:
        moved, again = False, True
        while again:
            again = False
            for queue, waiting in rank.queues.items():
                while rank.begun[queue] < len(waiting) and self._begin(rank, queue, waiting[rank.begun[queue]]):
                    rank.begun[queue] += 1
                    again = True
            for stream in rank.streams.values():
                while stream.done < len(stream.entries) and self._finish(stream.entries[stream.done]):
                    stream.done += 1
                    again = True
            moved |= again
        return moved

    def _begin(self, rank: _Rank, queue: int, running: _Running) -> bool:
        entry = running.entry
        stream = rank.streams[entry.stream]
        mine = stream.done  # all before it must be over
        if mine >= len(stream.entries) or stream.entries[mine] is not running:
            return False
        before = stream.entries[mine - 1].end if mine else 0.0
        needed = [running.issued, before]
        if isinstance(entry, Ordered):
            needed.append(self._end(rank, entry.point))
        if rank.begun[queue]:
            needed.append(rank.queues[queue][rank.begun[queue] - 1].start)
        if any(time is None for time in needed):
            return False
        running.start = max(time for time in needed if time is not None)
        return True

    def _finish(self, running: _Running) -> bool:
        if running.start is None:
            return False
        entry = running.entry
        seconds = entry.seconds if isinstance(entry, Launched) else 0.0
        if isinstance(entry, Launched) and entry.transfer is not None:
            members = [r for r in entry.transfer.ranks if r in self.ranks]
            mates = self.meetings[self.place[id(running)]]
            starts = [mates[r].start if r in mates else None for r in members]
            if any(start is None for start in starts):
                return False
            running.end = max(start for start in starts if start is not None) + seconds
            return True
        running.end = running.start + seconds
        return True

    # ------------------------------------------------------------------- results

    def outcome(self, mark: str) -> Outcome:
        hung = [rank.blocked for rank in self.ranks.values() if rank.position < len(rank.trace.entries)]
        for number, rank in self.ranks.items():
            if rank.position == len(rank.trace.entries):
                hung += self._stuck(number, rank)
        first = next(iter(self.ranks.values()))
        begin, seen = first.trace.marks.get(mark, 0), defaultdict(int)
        for entry in first.trace.entries[:begin]:
            if isinstance(entry, Launched | Ordered) and entry.stream != HOST:
                seen[entry.stream] += 1
        busy: dict[str, float] = defaultdict(float)
        since, until = 0.0, 0.0
        for name, stream in first.streams.items():
            for i, running in enumerate(stream.entries):
                if running.end is None:
                    continue
                until = max(until, running.end)
                if i < seen[name]:
                    since = max(since, running.end)
                elif isinstance(running.entry, Launched):
                    busy[name] += running.entry.seconds
        return Outcome(hung, dict(busy), until - since, max(map(self._waiting, self.ranks.values())))

    def _stuck(self, number: int, rank: _Rank) -> list[str]:
        for stream in rank.streams.values():
            if stream.done < len(stream.entries):
                entry = stream.entries[stream.done].entry
                what = (
                    f"{entry.what} at {entry.where}" if isinstance(entry, Launched) else f"a wait for {entry.point[0]}"
                )
                return [f"rank {number}: stream {entry.stream} does not get beyond {what}"]
        return []

    def _waiting(self, rank: _Rank) -> int:
        changes: list[tuple[float, int]] = []
        for stream in rank.streams.values():
            for running in stream.entries:
                if (
                    isinstance(running.entry, Launched)
                    and running.entry.transfer is not None
                    and running.start is not None
                ):
                    seconds = running.entry.seconds
                    comes = math.inf if running.end is None else running.end - seconds
                    if comes > running.start:
                        changes += [(running.start, 1), (comes, -1)]
        most = now = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most


def _direction(kind: str, rank: int, ranks: tuple[int, ...]) -> str:
    """A channel carries transfers one way; a pair of ranks with one communicator may have two."""
    if kind not in _MATES:
        return ""
    source = rank if kind == "send" else next(r for r in ranks if r != rank)
    return f" from {source}"


def replay(traces: Sequence[Trace], *, queues: int = 1 << 20, mark: str = "") -> Outcome:
    """Let the ranks run. `queues`: of the hardware; `mark`: from which place on time is counted."""
    model = _Replay(traces, queues)
    model.run()
    return model.outcome(mark)
