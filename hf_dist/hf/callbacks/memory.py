"""Peak memory of each log window, on the rank where it is largest."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_dist.dist import collectives
from hf_dist.hf.callbacks.log_record import LogCallback

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryCallback(LogCallback):
    """Adds `memory_peak_gb` (10**9 bytes) and `memory_peak_rank` to every training log; equal on all ranks.

    On a GPU: the largest amount of memory held by tensors since the last log. On a CPU: the largest resident set of the
    process (weights, Python and libraries together) since the last log, or since its start if the kernel does not
    allow a reset. One all-reduce of one number over all ranks per log.
    """

    _keeps_peak = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the first window."""
        super().on_train_begin(args, state, control, **kwargs)
        # HF's own tracker reads the same counter at the end and expects the peak of the whole run.
        self._keeps_peak = not args.skip_memory_metrics
        if self.engine is not None and not self._keeps_peak:
            reset_peak(self.engine.device)

    def values(self) -> dict[str, float | int]:
        """The largest peak of all ranks and the rank that had it (the lowest if several did). Collective over world."""
        engine = self.engine
        assert engine is not None
        world = engine.mesh.world
        # The lowest digits hold the rank, counted from the last: of equal peaks the lowest rank gives the largest number.
        number = torch.tensor(
            [peak_nbytes(engine.device) * world.size + world.size - 1 - world.rank], device=engine.device
        )
        collectives.all_reduce(engine.mesh.together, number, op="max").wait()
        largest, from_last = divmod(int(number), world.size)
        if not self._keeps_peak:
            reset_peak(engine.device)
        return {"memory_peak_gb": largest / 1e9, "memory_peak_rank": world.size - 1 - from_last}


def peak_nbytes(device: torch.device) -> int:
    """Most bytes held since the last `reset_peak`: by tensors on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource  # not available on every system

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Restart the peak from the current amount. No effect on a CPU whose kernel does not permit it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
