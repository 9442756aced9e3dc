"""The plain training loop, shared by all engines without a loop of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from hf_dist.tools.bench.meter import Meter
from hf_dist.tools.bench.work import Batch, Work

__all__ = ["Engine", "Loop", "blocks_of", "device_of", "join", "reduce_dtype"]


class Engine(Protocol):
    """The protocol of all engines."""

    def run(self, meter: Meter) -> None:
        """All steps of the work, with `meter.mark` after each phase and `meter.end_step` after each step."""


@dataclass
class Loop:
    """An engine as three functions."""

    work: Work
    rank: int
    forward: Callable[[Batch, bool], torch.Tensor]
    """(microbatch, whether it is the step's last) -> its mean loss, 0D."""
    backward: Callable[[torch.Tensor, bool], object]
    """Runs backward of that loss; divides by the number of microbatches per step."""
    update: Callable[[], object]
    """Clip, step, clear."""
    readers: int = 0
    """Ranks that read different rows; 0: all. `rank` counts among them."""

    def run(self, meter: Meter) -> None:
        """All steps of the work."""
        device = device_of(self.work)
        for window in self.work.windows(self.rank, self.readers or self.work.ranks):
            losses = []
            for i, microbatch in enumerate(window):
                batch = {key: value.to(device) for key, value in microbatch.items()}
                is_last = i + 1 == len(window)
                meter.mark("data")
                loss = self.forward(batch, is_last)
                meter.mark("forward")
                self.backward(loss, is_last)
                meter.mark("backward")
                losses.append(loss.detach())
                del loss
            self.update()
            meter.mark("optimizer")
            meter.end_step(torch.stack(losses).float().mean())


def device_of(work: Work) -> torch.device:
    """The device on which this rank trains."""
    return torch.device("cuda", torch.cuda.current_device()) if work.device == "cuda" else torch.device("cpu")


def join(work: Work) -> None:
    """Create the process group, as a script under torchrun does. Collective."""
    dist.init_process_group("nccl" if work.device == "cuda" else "gloo")


def reduce_dtype(work: Work) -> torch.dtype:
    """Dtype of gradients in reductions."""
    return torch.bfloat16 if work.reduce_dtype == "bf16" else torch.float32


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that HF itself never splits; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
