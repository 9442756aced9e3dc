"""Splits the time of a log window into phases, by marks on the clock of the host or of the GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Protocol

import torch

from hf_dist.dist import collectives

WAIT = "communication_wait"
PAUSE = "pause"
"""Evaluation and checkpoints, which the training speed excludes."""


class PhaseClock(Protocol):
    """Adds up seconds by phase."""

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`."""

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read."""


def start_clock(device: torch.device) -> PhaseClock:
    """The clock for this device, with its first mark now."""
    return GpuClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """For CPUs. Time blocked in waits of collectives is removed from the phases and counted as its own phase."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        self._waited = collectives.wait_seconds()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`."""
        now, waited = time.perf_counter(), collectives.wait_seconds()
        blocked = 0.0 if phase == PAUSE else waited - self._waited
        self._seconds[phase] += now - self._last - blocked
        self._seconds[WAIT] += blocked
        self._last, self._waited = now, waited

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read, `communication_wait` included."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


class GpuClock:
    """For GPUs: events in the current stream, because the host runs ahead of the GPU.

    A phase lasts from the end of the work queued before it to the end of its own work. GPU idle time (for example while the
    host waits for data) counts in the phase in which it occurs. Waits of collectives block a stream, never the host, so they
    count in the phase that needs the result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._last = self._event()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self, phase: str) -> None:
        """Count the work queued since the last mark as `phase`."""
        self._marks.append((phase, self._event()))

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read. Waits for the GPU, as HF just did to read the loss."""
        seconds: defaultdict[str, float] = defaultdict(float)
        if self._marks:
            self._marks[-1][1].synchronize()
        for phase, event in self._marks:
            seconds[phase] += self._last.elapsed_time(event) / 1e3
            self._last = event
        self._marks.clear()
        return dict(seconds)
