"""Measurements of one rank: time by phase, memory, bytes sent, losses, start-up. The same marks under every engine.

Unlike the clocks of `hf/callbacks/phases.py`: those include the waits of hf_dist's own collectives, which other engines do
not use, and are read during training. These marks are read once, after the last timed step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_dist.tools.bench.idle import gpu_idle_seconds
from hf_dist.tools.bench.work import WARMUP, Work

__all__ = ["PHASES", "Meter"]

PHASES = ("data", "forward", "backward", "optimizer", "pipeline")
"""The last one is a whole pipeline step, whose phases overlap."""
_STATUS = Path("/proc/self/status")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Counter(Protocol):
    """Counts the bytes that this rank sends while it is entered."""

    def __enter__(self) -> object: ...

    def __exit__(self, *args: Any) -> object: ...

    def nbytes(self) -> int | None:
        """Bytes sent; None if something was sent that cannot be counted."""


class Meter:
    """Engines call `mark` after each phase and `end_step` after each step; the meter does the rest."""

    def __init__(self, work: Work, counter: Counter, imported: float) -> None:
        """`imported`: time (`time.time`) at which the engine's libraries were imported; memory counts from here."""
        self._work = work
        self._counter = counter
        self._on_gpu = work.device == "cuda"
        self._profiler: AbstractContextManager[object] | None = None
        self._born = float(os.environ["HF_DIST_BENCH_BORN"])
        self._base = torch.cuda.memory_allocated() if self._on_gpu else _resident("VmRSS")
        self._losses: list[torch.Tensor] = []
        self._stamps: list[tuple[str, Any, float]] = []
        self._timing = False
        self.found: dict[str, object] = {"import_seconds": imported - self._born, "waiting_seconds": None}

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase` (one of `PHASES`)."""
        if self._timing:
            self._stamp(phase)

    def end_step(self, loss: torch.Tensor) -> None:
        """End a step. `loss`: its loss on this rank, 0-D, on any device."""
        self._losses.append(loss.detach().float())
        done, timed = len(self._losses), WARMUP + self._work.steps
        if done == 1:
            float(loss)  # waits for the GPU
            self.found["first_step_seconds"] = time.time() - self._born
        if done == WARMUP:
            self._reset_peak()
            self._timing = True
            self._stamp("")
        elif self._timing:
            self._stamp("end")
        if done == timed:
            self._timing = False
            self._read()
            self._counter.__enter__()
        elif done == timed + 1:
            self._counter.__exit__(None, None, None)
            self.found["sent_nbytes"] = self._counter.nbytes()
            if self._on_gpu:
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.__enter__()
        elif self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            self.found["waiting_seconds"] = gpu_idle_seconds(self._profiler)
            self._profiler = None
        if done == self._work.total_steps:
            self.found["losses"] = [float(each) for each in self._losses]

    def _stamp(self, phase: str) -> None:
        if self._on_gpu:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self._stamps.append((phase, event, 0.0))
        else:
            self._stamps.append((phase, time.perf_counter(), _busy_seconds()))

    def _reset_peak(self) -> None:
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):  # not on Linux, or not allowed: then the peak counts since the start
                Path("/proc/self/clear_refs").write_text("5")  # restarts the high-water mark from the current amount

    def _read(self) -> None:
        """Compute seconds per step and by phase, the peak above the base, and on a CPU the seconds without work."""
        if self._on_gpu:
            torch.cuda.synchronize()
            self.found["peak_nbytes"] = torch.cuda.max_memory_allocated() - self._base
        else:
            self.found["peak_nbytes"] = _resident("VmHWM") - self._base
        steps = [0.0]
        phases: defaultdict[str, float] = defaultdict(float)
        for before, after in zip(self._stamps, self._stamps[1:], strict=False):
            seconds = before[1].elapsed_time(after[1]) / 1e3 if self._on_gpu else after[1] - before[1]
            steps[-1] += seconds
            if after[0] == "end":
                steps.append(0.0)
            else:
                phases[after[0]] += seconds / self._work.steps
        self.found |= {"step_seconds": steps[:-1], "phases": dict(phases)}
        if not self._on_gpu and _SCHEDSTAT.exists():
            first, last = self._stamps[0], self._stamps[-1]
            idle = (last[1] - first[1]) - (last[2] - first[2])
            self.found["waiting_seconds"] = max(0.0, idle) / self._work.steps


def _busy_seconds() -> float:
    """Seconds in which this thread ran, or was ready while others used the core; otherwise it waited."""
    if not _SCHEDSTAT.exists():
        return 0.0
    ran, ready, _ = _SCHEDSTAT.read_text().split()
    return (int(ran) + int(ready)) / 1e9


def _resident(key: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM peak. If the kernel does not report them, the peak for both."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    match = re.search(key + r":\s+(\d+)", _STATUS.read_text())
    assert match is not None
    return int(match[1]) * 1024
