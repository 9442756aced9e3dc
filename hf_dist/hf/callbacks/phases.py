"""Splits the time of a log window into phases, by marks on the clock of the host or of the GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hf_dist.dist import collectives, host_info, watchdog
from hf_dist.dist.watchdog.own_time import CORE

WAIT = "communication_wait"
PAUSE = "pause"
"""Evaluation and checkpoints, which the training speed excludes."""


class PhaseClock(Protocol):
    """Adds up seconds by phase."""

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`."""

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read."""

    def tell(self, step: int, seconds: Mapping[str, float]) -> None:
        """Give what was read after `step` optimizer steps to the watchdog, as this rank's own time."""


def start_clock(device: torch.device) -> PhaseClock:
    """The clock for this device, with its first mark now."""
    return GpuClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """For CPUs. Time blocked in waits of collectives is removed from the phases and counted as its own phase."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._delays: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        self._waited = collectives.wait_seconds()
        self._delay = host_info.CoreDelay()
        collectives.split_waits(self._delay.seconds)
        self._delayed = self._delay_outside_waits()

    def _delay_outside_waits(self) -> float:
        return self._delay.seconds() - collectives.waits_for_core()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`."""
        now, waited, delayed = time.perf_counter(), collectives.wait_seconds(), self._delay_outside_waits()
        blocked = 0.0 if phase == PAUSE else waited - self._waited
        self._seconds[phase] += now - self._last - blocked
        self._seconds[WAIT] += blocked
        self._delays[phase] += delayed - self._delayed
        self._last, self._waited, self._delayed = now, waited, delayed

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read, `communication_wait` included."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def tell(self, step: int, seconds: Mapping[str, float]) -> None:
        """Every phase without its waits; not evaluations and saves, which only some ranks may do.

        The time without a core is apart: on a busy machine it comes to each rank in turn.
        """
        delays, self._delays = self._delays, defaultdict(float)
        own = {phase: s - delays[phase] for phase, s in seconds.items() if phase not in (WAIT, PAUSE)}
        own[CORE] = sum(delays[phase] for phase in own)
        watchdog.end_window(step, own, wall=sum(seconds.values()))


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
        self._host = HostClock()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self, phase: str) -> None:
        """Count the work queued since the last mark as `phase`."""
        self._marks.append((phase, self._event()))
        self._host.mark(phase)

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

    def tell(self, step: int, seconds: Mapping[str, float]) -> None:
        """The time for which the host was with the data loader and the GPU waited for it; the rest may hold waits.

        The host's time alone counts a loader that works behind the GPU; the GPU's alone, waits for other ranks' counts.
        """
        data = min(seconds.get("data", 0.0), self._host.read().get("data", 0.0))
        busy = sum(seconds.values()) - seconds.get(PAUSE, 0.0)
        watchdog.end_window(step, {"data": data}, wall=sum(seconds.values()), mixed=busy - data)
