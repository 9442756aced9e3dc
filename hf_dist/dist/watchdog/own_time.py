"""The time that a rank needs for itself, added up by log windows, for its status. Pure.

Wall times cannot tell who is slow: ranks in lockstep have equal ones. A rank's own time is the wall time without its waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CORE", "KEPT", "OwnTime", "Total"]

CORE = "core"
"""The phase of the time for which a rank was ready to run and had no processor core."""
KEPT = 8
"""Totals that a status carries: ranks speak at different moments, and a status may be lost."""


@dataclass(frozen=True)
class Total:
    """One rank's own time since its process began to train, at the end of a log window."""

    number: int
    """Log windows so far; equal on all ranks at the same step."""
    step: int
    own: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds without waits for other ranks."""
    mixed: float = 0.0
    """Seconds of which nobody can say how much was waiting: those of a GPU's queue."""

    @property
    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON; `Total(**...)` restores it."""
        return {**asdict(self), "own": {phase: round(seconds, 4) for phase, seconds in self.own.items()}}


class OwnTime:
    """Adds up the windows of this rank, and keeps the totals that its status carries.

    Short windows are put together: totals are kept every k windows, k a power of two, so that they lie about `least` seconds
    apart. Ranks in lockstep choose the same k, or neighbouring ones, whose totals meet at every second one.
    """

    def __init__(self, least: float) -> None:
        self.least = least
        self._number = 0
        self._own: dict[str, float] = {}
        self._mixed = 0.0
        self._wall = 0.0
        self._kept: deque[Total] = deque(maxlen=KEPT)

    def add(self, step: int, own: Mapping[str, float], *, wall: float, mixed: float = 0.0) -> None:
        """A window of `wall` seconds that ended after `step` optimizer steps: seconds by phase, and which may hold waits."""
        self._number += 1
        for phase, seconds in own.items():
            self._own[phase] = self._own.get(phase, 0.0) + seconds
        self._mixed += mixed
        self._wall += wall
        mean = self._wall / self._number  # about equal on all ranks
        every = 1 << max(0, math.ceil(math.log2(self.least / mean))) if mean > 0 else 1
        if self._number % every == 0:
            self._kept.append(Total(self._number, step, dict(self._own), self._mixed))

    @property
    def totals(self) -> list[dict[str, Any]]:
        """The last totals, for a status."""
        return [total.as_dict for total in self._kept.copy()]
