"""Streaming DiLoCo: fragments of the model meet in turn, and their communication overlaps training.

Fragment p of P is every P-th unit from unit p on ("strided"). It starts at steps that are (p + 1) * every // P beyond a
multiple of `every`, and its result is applied `overlap` steps later. From arXiv 2501.18512, algorithm 2 (tau: `overlap`,
alpha: `mix`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hf_dist.config.training_sections import LocalSgdConfig

__all__ = ["Turns"]


class Turns:
    """Schedules the starts of fragments and tracks what is in flight. Every rank has one and makes the same calls."""

    def __init__(self, config: LocalSgdConfig, num_units: int) -> None:
        """`num_units`: units of this rank's model; with fewer units than fragments, some turns are empty."""
        self.every, self.overlap, self.count = config.every, config.overlap, config.fragments
        self.streams = config.streams
        """Whether fragments meet in turn or overlap training; otherwise all meet at once."""
        self.units = [tuple(range(first, num_units, self.count)) for first in range(self.count)]
        """The units of each fragment, by their numbers."""
        self._under_way: deque[tuple[int, Callable[[], None]]] = deque()

    def starting(self, step: int) -> Iterator[int]:
        """The fragments that start after step `step`, from 1."""
        for fragment in range(self.count):
            if (step - (fragment + 1) * self.every // self.count) % self.every == 0:
                yield fragment

    def add(self, step: int, take_up: Callable[[], None]) -> None:
        """Register a transfer that started after `step`; `take_up` waits for it and applies it."""
        self._under_way.append((step + self.overlap, take_up))

    def is_due(self, step: int) -> bool:
        """Whether a result is to be applied after `step`."""
        return bool(self._under_way) and self._under_way[0][0] <= step

    def take_up(self, step: int | None = None) -> bool:
        """Apply results due after `step`, or all in flight. Returns whether there were any. All replicas call it alike."""
        taken = False
        while self._under_way and (step is None or self.is_due(step)):
            self._under_way.popleft()[1]()
            taken = True
        return taken
