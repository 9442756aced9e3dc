"""A layout that fits, with its plan and its step."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist.memory.offload.resting import Tier
from hf_dist.planning.layouts import Layout
from hf_dist.planning.memory_plan import MemoryPlan
from hf_dist.planning.step_time import StepTime

__all__ = ["Found"]

_SHOWS = 1e-3
"""Share of a step below which a difference is ignored."""


@dataclass(frozen=True)
class Found:
    """A layout that fits."""

    layout: Layout
    plan: MemoryPlan
    time: StepTime
    tokens: int
    """Tokens of a step over all ranks."""
    ranks: int

    @property
    def speed(self) -> float:
        """Tokens per second and rank in the time model; only ratios are meaningful."""
        return self.tokens / self.time.seconds / self.ranks

    @property
    def at_rest(self) -> int:
        """Bytes on the device between two steps."""
        return self.plan.states.nbytes.resident(Tier.DEVICE)

    def loses(self, first: Found) -> list[tuple[str, float]]:
        """(part of the step, additional seconds over `first`), largest first, without parts in which it is faster."""
        mine, theirs = self.time.parts, first.time.parts
        more = [(name, mine[name] - theirs[name]) for name in mine]
        return sorted((pair for pair in more if pair[1] > _SHOWS * first.time.seconds), key=lambda pair: -pair[1])
