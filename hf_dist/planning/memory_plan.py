"""Does it fit: states, activations and temporary memory on the fullest rank of a job, from a config and a meta model.

Exact: everything stored between two steps (`state_bytes.py`). Estimated: the peak on the device, the largest of three moments:

    the loss      resting + gathered + gradients of earlier microbatches + activations + logits, or the last norm's backward
    backward      resting + the recomputed block + the maximum, over the sequence of units, of
                  gathered weights + remaining activations + gradients in flight + reduced gradients
    the step      resting + encoded weights on their way, where weights rest whole

In addition to tensors, GPU plans count the context, cuBLAS and NCCL (`overhead.py`). Not counted: fragmentation of the
allocator, memory of other programs, and the host memory of the program itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hf_dist.config import settled
from hf_dist.memory.offload.resting import Tier
from hf_dist.planning.activations import Kept
from hf_dist.planning.state_bytes import States
from hf_dist.planning.temporary import Temporary


@dataclass(frozen=True)
class Limits:
    """Available memory in bytes; None if unknown."""

    device: int | None = None
    """Per rank."""
    host: int | None = None
    """Per machine."""
    ranks_per_machine: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes of one rank."""

    states: States
    kept: Kept | None
    """Activations of all microbatches in flight; None if the model could not run on meta."""
    in_flight: int
    """Microbatches whose activations are kept at the same time; more than one in a pipeline."""
    logits: int
    checkpoint: int
    """Bytes on disk, for the whole job."""
    stage: int = 0
    """The rank's pipeline stage; 0 without a pipeline."""
    travelling: int = 0
    """Bytes of tensors on their way between pipeline stages."""
    problem: str = ""
    """Why there are no activations."""
    beside: int = 0
    """Bytes on the device that belong to no tensor."""

    @property
    def activations(self) -> int:
        """Activation bytes on the device, from forward to backward."""
        return self.kept.device if self.kept else 0

    @property
    def at_last_block(self) -> int:
        """What is left of them when backward reaches the last block."""
        return self.activations - self.kept.behind if self.kept else 0

    @property
    def recomputed(self) -> int:
        """Bytes of the block that is recomputed."""
        return self.kept.recomputed if self.kept else 0

    @property
    def passing(self) -> int:
        """Gradients of activations in one block's backward."""
        return self.kept.passing if self.kept else 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for later microbatches."""
        return (settled(self.states.config.gradient_accumulation_steps) or 1) > 1 or self.in_flight > 1

    @property
    def sums_window(self) -> bool:
        """Whether they wait unreduced, in full."""
        return self.accumulates and self.states.collects_window

    @property
    def waiting(self) -> int:
        """Bytes of gradients of earlier microbatches."""
        if not self.accumulates:
            return 0
        if self.states.collects_window:
            return self.states.window_nbytes
        held = self.states.nbytes
        return held.awaiting[Tier.DEVICE] or held.gradients[Tier.DEVICE]

    @cached_property
    def backward(self) -> int:
        """Temporary memory at the fullest moment of backward, including one recomputed block."""
        temporary = Temporary(self.states)
        if self.sums_window:
            # Window sums are replaced by reduced gradients, which are never larger, so the start is the fullest moment.
            newest = temporary.newest(self.recomputed + self.passing)
            return self.at_last_block + self.travelling + self.waiting + temporary.gathered + newest
        passes = self.recomputed + self.passing
        return self.travelling + temporary.backward(self.activations, passes, accumulated=self.accumulates)

    @cached_property
    def device_peak(self) -> int:
        """Peak of tensors on the device; see the module."""
        loss = max(self.activations + self.logits, self.at_last_block + (self.kept.closing if self.kept else 0))
        loss += Temporary(self.states).gathered_at_loss + self.waiting + self.travelling
        return self.states.nbytes.resident(Tier.DEVICE) + max(loss, self.backward, Temporary(self.states).after_step)

    @property
    def device_need(self) -> int:
        """Memory that the device needs: the peak of tensors plus memory of no tensor."""
        return self.device_peak + self.beside

    @property
    def host(self) -> int:
        """Bytes of one rank on the host."""
        return self.states.nbytes.resident(Tier.HOST) + (self.kept.host if self.kept else 0)

    @property
    def disk(self) -> int:
        """Bytes of one rank's offloaded states on disk."""
        return self.states.nbytes.resident(Tier.DISK)

    def over(self, limits: Limits) -> int:
        """Missing bytes, over all kinds of memory; 0 if it fits."""
        missing = 0 if limits.device is None else max(0, self.device_need - limits.device)
        if limits.host is not None:
            missing += max(0, self.host * limits.ranks_per_machine - limits.host)
        return missing

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, "exact" or the kind of estimate) for one rank, without zero rows."""
        rows = [
            ("gradients of earlier microbatches", self.waiting, "estimate"),
            ("activations", self.activations, "measured on meta"),
            ("one recomputed block", self.recomputed, "measured on meta"),
            ("gradients of a block's activations", self.passing, "estimate"),
            ("activations on the host", self.kept.host if self.kept else 0, "measured on meta"),
            ("on the way between stages", self.travelling, "estimate"),
            ("logits and loss", self.logits, "estimate"),
            ("temporary memory in backward", self.backward, "at most"),
        ]
        return self.states.rows() + Temporary(self.states).rows() + [row for row in rows if row[1]]

    def as_dict(self) -> dict[str, object]:
        """Plain values for programs."""
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
