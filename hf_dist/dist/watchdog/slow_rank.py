"""Which rank makes the others wait, window after window: the totals of all ranks in, a sentence out. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hf_dist.dist.watchdog.own_time import CORE, KEPT, Total
from hf_dist.dist.watchdog.report import Status

__all__ = ["SlowRanks"]

WINDOWS = 3
"""Windows in a row after which a slow rank is named."""
WINDOWS_WITHOUT_CORE = 12
"""The same for a rank that lacks a processor core: where more threads run than there are cores, that is each one in turn."""
RATIO = 1.2
"""A rank is slow from this multiple of the median of the other ranks on."""
_WORDS = {
    "data": "data loader",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer step",
    "other": "callbacks and logging",
    CORE: "waiting for a processor core, which other programs have",
}


class SlowRanks:
    """One `SlowRank` for each pipeline stage, because only the ranks of one stage do the same work."""

    def __init__(self) -> None:
        self._stages: dict[int, SlowRank] = {}

    def name(self, statuses: Sequence[Status], world: int) -> list[str]:
        """Lines to print now. Empty until all `world` ranks have been heard of."""
        lines = []
        for stage in sorted({s.stage for s in statuses}) if len(statuses) == world else ():
            peers = {s.rank: s for s in statuses if s.stage == stage}
            found = self._stages.setdefault(stage, SlowRank()).hear({rank: s.totals for rank, s in peers.items()})
            lines += [] if found is None else [f"hf_dist watchdog: {peers[found[0]].who} {found[1]}"]
        return lines


@dataclass(frozen=True)
class Window:
    """What was measured of all ranks that do the same work, between two totals that they share."""

    steps: tuple[int, int]
    work: dict[int, float]
    """Rank -> seconds of its own."""
    own: dict[int, dict[str, float]]

    @classmethod
    def between(cls, first: Mapping[int, Total], last: Mapping[int, Total]) -> Window:
        """The window between totals of all ranks.

        Of the time that may hold waits, the shortest of all ranks counts for all: it holds the fewest.
        """
        own = {
            rank: {phase: seconds - first[rank].own.get(phase, 0.0) for phase, seconds in total.own.items()}
            for rank, total in last.items()
        }
        shared = min(total.mixed - first[rank].mixed for rank, total in last.items())
        some = next(iter(last))
        steps = (first[some].step, last[some].step)
        return cls(steps, {rank: sum(phases.values()) + shared for rank, phases in own.items()}, own)

    def without_core(self) -> Window:
        """The same without the time in which a rank had no core."""
        own = {rank: {p: s for p, s in phases.items() if p != CORE} for rank, phases in self.own.items()}
        return Window(self.steps, {r: s - self.own[r].get(CORE, 0.0) for r, s in self.work.items()}, own)

    def slow(self) -> tuple[int, float] | None:
        """(rank that makes the others wait, its time over the median of theirs); None if all need about as long."""
        rank = max(self.work, key=lambda r: self.work[r])
        others = median(seconds for r, seconds in self.work.items() if r != rank)
        ratio = self.work[rank] / others if others > 0 else 1.0
        return (rank, ratio) if ratio >= RATIO else None

    def phase(self, rank: int) -> str:
        """The phase in which `rank` needs most beyond the median of the others."""
        others = [own for r, own in self.own.items() if r != rank]
        excess = {p: s - median(own.get(p, 0.0) for own in others) for p, s in self.own[rank].items()}
        return max(excess, key=lambda p: excess[p])


class Row:
    """The windows in a row in which the same rank was slow."""

    def __init__(self, windows: int) -> None:
        """`windows`: as many before the rank is named."""
        self._least = self._next = windows
        self._seen: list[tuple[int, float, str, tuple[int, int]]] = []

    def add(self, window: Window) -> tuple[int, str] | None:
        """(rank, sentence without the name) when it must be named.

        Named after the least number of windows, then after twice as many, and so on, so that a log of days has few lines.
        """
        slow = window.slow()
        if slow is None or (self._seen and self._seen[-1][0] != slow[0]):
            self._seen, self._next = [], self._least
        if slow is None:
            return None
        rank, ratio = slow
        self._seen.append((rank, ratio, window.phase(rank), window.steps))
        if len(self._seen) < self._next:
            return None
        self._next *= 2
        phases = [phase for _, _, phase, _ in self._seen]
        most = max(dict.fromkeys(phases), key=phases.count)
        ratio = median(ratio for _, ratio, _, _ in self._seen)
        return rank, (
            f"makes the others wait: {ratio:.2g} of the median for {len(self._seen)} windows, in: {_WORDS.get(most, most)} "
            f"(steps {self._seen[0][3][0] + 1} to {window.steps[1]})"
        )


class SlowRank:
    """Compares the totals of ranks that do the same work, and names one that is slow in window after window."""

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, Total]] = {}
        self._last = -1
        """Number of the newest total that was judged."""
        self._at_work, self._in_all = Row(WINDOWS), Row(WINDOWS_WITHOUT_CORE)

    def hear(self, totals: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[int, str] | None:
        """(rank, sentence without the name) when a slow rank must be named; None otherwise. `totals`: rank -> what it said."""
        for rank, said in totals.items():
            heard = self._heard.setdefault(rank, {})
            heard |= {found.number: found for found in (Total(**one) for one in said)}
            for old in sorted(heard)[: -4 * KEPT]:
                del heard[old]
        common = sorted(set.intersection(*(set(self._heard.get(rank, {})) for rank in totals))) if totals else []
        found = None
        for before, now in itertools.pairwise(common):
            if now > self._last and len(totals) > 1:
                self._last = now
                first, last = ({rank: self._heard[rank][number] for rank in totals} for number in (before, now))
                window = Window.between(first, last)
                in_all = self._in_all.add(window)
                found = self._at_work.add(window.without_core()) or in_all or found
        return found
