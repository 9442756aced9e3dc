"""What one rank of a pipeline holds of a model, and keeps of a window of microbatches beside weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_dist.config import DistConfig
from hf_dist.parallel.pipeline import PlannedSplit, Schedule
from hf_dist.parallel.pipeline.actions import Kind
from hf_dist.parallel.pipeline.runtime import BUFFERS
from hf_dist.planning.activations import Activations, Kept

__all__ = ["PipelineRank", "PlannedStage", "cut_rank", "flying", "transfers"]


_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""What ends a microbatch in a stage."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the rank."""

    paths: frozenset[str]
    """Its blocks."""
    in_flight: int
    """Microbatches between their forward and backward, at most."""
    deferred: int = 0
    """Microbatches whose weight gradients are still to be computed, and the one computed now (zero-bubble schedules)."""


@dataclass(frozen=True)
class PipelineRank:
    """By default the only rank: it holds the whole model, and one microbatch at a time."""

    number: int = 0
    names: frozenset[str] | None = None
    """Parameters of its stages; None: all."""
    stages: tuple[PlannedStage, ...] = ()
    """Without a pipeline there are none."""
    holders: Mapping[str, object] = field(default_factory=dict)
    """Parameters that other ranks also hold, each with an object of its own: stages need not have the same ones in a unit."""
    num_holders: int = 0
    """Groups of ranks that share such parameters."""
    is_last: bool = True
    """Whether it computes the loss."""
    transfers: float = 0.0
    """Sent and received tensors that are there at the same time, in hidden states of a microbatch."""

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward, at most."""
        return max((stage.in_flight for stage in self.stages), default=1)

    def kept(self, measured: Activations, config: DistConfig, checkpointing: bool) -> Kept:
        """Activations of all microbatches in flight, with the logits of those that wait for the backward of another one."""
        if not self.stages:
            return measured.kept(config, checkpointing)
        parts = [(stage, measured.kept(config, checkpointing, stage.paths)) for stage in self.stages]
        device = sum(stage.in_flight * part.device + stage.deferred * part.deferred for stage, part in parts)
        if self.is_last:
            last = self.stages[-1]
            device += (last.in_flight - 1 + last.deferred) * measured.waiting_logits(config)
        host = sum(stage.in_flight * part.host for stage, part in parts)
        names = ("recomputed", "passing", "behind", "closing")
        most = {name: max(getattr(part, name) for _, part in parts) for name in names}
        return Kept(device=device, host=host, **most)

    def travelling(self, measured: Activations) -> int:
        """Bytes of tensors on their way between stages."""
        return round(self.transfers * max((block.input for block in measured.blocks), default=0))


def cut_rank(split: PlannedSplit, schedule: Schedule, number: int) -> PipelineRank:
    """Rank `number` of a pipeline that runs `split` by `schedule`."""
    plan, ranks = split.plan, schedule.num_ranks
    mine = range(number, plan.num_stages, ranks)
    in_flight = dict(zip(mine, flying(schedule, number), strict=True))
    shared = {s.names[0]: frozenset(stage % ranks for stage in s.stages) for s in plan.shared}
    holders = {name: object() for name, held in shared.items() if len(held) > 1 and number in held}
    sizes = [[math.prod(spec.shape) for spec in plan.boundaries[s - 1].specs] for s in mine if s]
    sizes += [[math.prod(spec.shape) for spec in plan.boundaries[s].specs] for s in mine if s + 1 < plan.num_stages]
    one = max((sum(each) / max(each) for each in sizes if any(each)), default=1.0)
    return PipelineRank(
        number,
        frozenset(n for s in mine for n in plan.names_of(s)),
        tuple(
            PlannedStage(
                frozenset(c.module for c in plan.calls[plan.bounds[s] : plan.bounds[s + 1]]),
                in_flight[s],
                _deferred(schedule, s) if s else 0,  # the first stage's backward has one part
            )
            for s in mine
        ),
        holders,
        len({shared[name] for name in holders}),
        plan.num_stages - 1 in mine,
        one * transfers(number, ranks, [in_flight[s] for s in mine], schedule.num_microbatches),
    )


def flying(schedule: Schedule, rank: int) -> list[int]:
    """Microbatches between forward and backward in each of the rank's stages, when they are most in all of them together."""
    now = dict.fromkeys(schedule.stages_of(rank), 0)
    most = list(now.values())
    for action in schedule.ranks[rank]:
        if action.stage in now:
            now[action.stage] += (action.kind is Kind.FORWARD) - (action.kind in _LAST)
            most = max(most, list(now.values()), key=sum)
    return most


def _deferred(schedule: Schedule, stage: int) -> int:
    now = most = 0
    for action in (a for actions in schedule.ranks for a in actions if a.stage == stage):
        now += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHT)
        most = max(most, now)
    return most


def transfers(rank: int, ranks: int, in_flight: Sequence[int], microbatches: int) -> int:
    """Tensors between stages that are there when most microbatches of the rank's stages are `in_flight`.

    Receives are posted ahead (over NCCL one fewer, see `ScheduleRun`). The gradient that a backward begins with is there, and
    the tensor that was sent last stays until the next one is sent. Received activations count as the first block's input.
    """
    rings = len(in_flight) > 1
    flying, left = sum(in_flight), len(in_flight) * microbatches - sum(in_flight)
    forward = min(BUFFERS, left) if rank or rings else 0
    backward = min(BUFFERS, flying - 1) if rank + 1 < ranks or rings else 0
    return forward + backward + 2
