"""A profile of some optimizer steps (`hf_dist.profile`): torch's trace, with the engine's phases as ranges in it.

    profile/rank0_steps10-12.json.gz          open at https://ui.perfetto.dev; `hf-dist profile FILE` adds it up
    profile/rank0_steps10-12.pickle           CUDA's memory, open at https://pytorch.org/memory_viz
    profile/rank0_step57_out_of_memory.pickle the same where memory ran out, in any step

A profile begins with the end of the step before its first one and ends with its last, or with the process.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from pathlib import Path
from typing import Any

import torch

from hf_dist.config.sections import ProfileConfig
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ConfigError, Problem
from hf_dist.log import say_here

__all__ = ["StepProfile"]

_MOST_EVENTS = 1_000_000
"""Allocations of which a memory snapshot knows the place."""


class StepProfile:
    """Takes the profile of one engine on one of the ranks that are asked for."""

    _taking: StepProfile | None = None
    """torch has one profiler per process."""

    def __init__(self, section: ProfileConfig, mesh: ParallelMesh) -> None:
        """Begin at once if the first step is asked for. Local."""
        assert section.steps is not None
        self.first, self.last = section.steps
        self._folder = Path(section.output_path)
        self._rank = mesh.world.rank
        self._step = 0
        self._profiler: Any = None
        self._remembers = mesh.device.type == "cuda"
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
            c: Any = torch._C
            c._cuda_attach_out_of_memory_observer(functools.partial(_out_of_memory, weakref.ref(self)))
        self.after_step(0)

    @classmethod
    def of(cls, section: ProfileConfig, mesh: ParallelMesh) -> StepProfile | None:
        """The profile of this rank; None if none is asked for. Raises `ConfigError` for a rank that the job does not have."""
        if section.steps is not None and (last := max(section.ranks, default=0)) >= mesh.world.size:
            raise ConfigError(
                Problem("hf_dist.profile.ranks", str(last), f"is not one of {mesh.world.size} ranks", "Count from 0.")
            )
        if section.steps is None or mesh.world.rank not in section.ranks:
            return None
        return cls(section, mesh)

    def after_step(self, number: int) -> None:
        """Begin or end, `number` optimizer steps having been done. Local."""
        self._step = number
        if self._profiler is not None and number >= self.last:
            self.end()
        elif self._profiler is None and self.first - 1 <= number < self.last and StepProfile._taking is None:
            self._begin()

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._remembers:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()
        StepProfile._taking = self
        self.first = self._step + 1  # a resume may come later than the step that was asked for
        atexit.register(self.end)

    def end(self) -> None:
        """Write what there is. Local."""
        if self._profiler is None:
            return
        atexit.unregister(self.end)
        profiler, self._profiler, StepProfile._taking = self._profiler, None, None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = f"steps{self.first}-{max(self._step, self.first)}"
        trace = self._folder / f"rank{self._rank}_{steps}.json.gz"
        profiler.export_chrome_trace(str(trace))
        say_here(f"profile: {trace} (open it at https://ui.perfetto.dev, or: hf-dist profile {trace})")
        if self._remembers:
            self._snapshot(f"rank{self._rank}_{steps}.pickle")

    def _snapshot(self, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / name
        torch.cuda.memory._dump_snapshot(str(file))
        say_here(f"profile: {file} (open it at https://pytorch.org/memory_viz)")

    def out_of_memory(self) -> None:
        """Write what is in memory. Local."""
        self._snapshot(f"rank{self._rank}_step{self._step + 1}_out_of_memory.pickle")


def _out_of_memory(me: weakref.ref[StepProfile], *sizes: object) -> None:
    own = me()
    if own is not None:
        own.out_of_memory()
