"""Will it fit: states, activations and what comes and goes, on the fullest rank of a job, from a config and a meta model.

Exact: everything that rests between two steps (`state_bytes.py`). Estimated: the peak on the device, the larger of two moments:

    the loss      resting + gathered + gradients of earlier microbatches + activations + logits
    backward      resting + the block that is computed again + the most, as one unit follows the other, of
                  gathered weights + activations that are left + gradients on their way + reduced gradients

Beside tensors: what the context, cuBLAS and NCCL take of a GPU (`overhead.py`), where a plan is for GPUs. Not counted: the
allocator's fragments, memory of other programs, and on the host the program itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_dist.config import settled
from hf_dist.estimate.activations import Kept
from hf_dist.estimate.state_bytes import States
from hf_dist.offload.resting import Tier


@dataclass(frozen=True)
class Limits:
    """What there is; bytes, None where it is not known."""

    device: int | None = None
    """Of one rank."""
    host: int | None = None
    """Of one machine."""
    ranks_per_machine: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank."""

    states: States
    kept: Kept | None
    """Activations of one microbatch; None where the model could not be run on meta."""
    in_flight: int
    """Microbatches whose activations are kept at a time: more than one in a pipeline."""
    logits: int
    checkpoint: int
    """On disk, of the whole job."""
    stage: int = 0
    """The pipeline stage's rank; 0 without one."""
    problem: str = ""
    """Why there are no activations."""
    beside: int = 0
    """On the device, of what is no tensor."""

    @property
    def activations(self) -> int:
        """On the device, from forward to backward."""
        return self.kept.device * self.in_flight if self.kept else 0

    @property
    def recomputed(self) -> int:
        """Of the block that is computed again."""
        return self.kept.recomputed if self.kept else 0

    @property
    def passing(self) -> int:
        """Gradients of activations in a block's backward."""
        return self.kept.passing if self.kept else 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for later microbatches."""
        return (settled(self.states.config.gradient_accumulation_steps) or 1) > 1 or self.in_flight > 1

    @property
    def waiting(self) -> int:
        """Gradients of earlier microbatches."""
        if not self.accumulates:
            return 0
        return self.states.window_nbytes() if self.states.collects_window else self.states.nbytes.gradients[Tier.DEVICE]

    @cached_property
    def backward(self) -> int:
        """What comes and goes at the fullest moment of the backward, one block that is computed again included."""
        states = self.states
        if self.accumulates and states.collects_window:
            # The window's sums give way to what is reduced, which is never more: the beginning is the fullest.
            return self.activations + self.waiting + states.gathered_nbytes + self.recomputed + self.passing
        return states.backward_nbytes(self.activations, self.recomputed + self.passing, accumulated=self.accumulates)

    @cached_property
    def device_peak(self) -> int:
        """See the module."""
        loss = self.states.gathered_at_loss_nbytes + self.waiting + self.activations + self.logits
        return self.states.nbytes.resident(Tier.DEVICE) + max(loss, self.backward)

    @property
    def device_need(self) -> int:
        """What the device must have: the peak of tensors, and what is none."""
        return self.device_peak + self.beside

    @property
    def host(self) -> int:
        """On the host, of one rank."""
        return self.states.nbytes.resident(Tier.HOST) + (self.kept.host * self.in_flight if self.kept else 0)

    @property
    def disk(self) -> int:
        """Offloaded states of one rank on disk."""
        return self.states.nbytes.resident(Tier.DISK)

    def over(self, limits: Limits) -> int:
        """Bytes that are missing, over all kinds of memory; 0 if it fits."""
        missing = 0 if limits.device is None else max(0, self.device_need - limits.device)
        if limits.host is not None:
            missing += max(0, self.host * limits.ranks_per_machine - limits.host)
        return missing

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, "exact" or how it is meant) of one rank; nothing that is zero."""
        rows = [
            ("gradients of earlier microbatches", self.waiting, "estimate"),
            ("activations", self.activations, "measured on meta"),
            ("one block computed again", self.recomputed, "measured on meta"),
            ("gradients of a block's activations", self.passing, "estimate"),
            ("activations on the host", self.kept.host * self.in_flight if self.kept else 0, "measured on meta"),
            ("logits and loss", self.logits, "estimate"),
            ("all that comes and goes in backward", self.backward, "at most"),
        ]
        return self.states.rows() + [row for row in rows if row[1]]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rows": [{"what": what, "bytes": nbytes, "kind": kind} for what, nbytes, kind in self.rows()],
            "device_peak": self.device_peak,
            "device_beside": self.beside,
            "host": self.host,
            "disk": self.disk,
            "checkpoint": self.checkpoint,
            "pipeline_rank": self.stage,
            "problem": self.problem,
        }
