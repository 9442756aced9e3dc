"""Weights of which no other rank holds a part: this rank reads them at any time, also where they rest sharded."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from hf_dist.memory.offload.resting import Tier
from hf_dist.sharding.group_axes import GroupAxes
from hf_dist.sharding.guard import guard, is_guarded, is_left, unguard
from hf_dist.sharding.resting_weights import RestingWeights

__all__ = ["gathers_alone", "leave_elements"]


class GatheredGroup(Protocol):
    """Flat weights that rest sharded."""

    params: list[nn.Parameter]
    axes: GroupAxes
    rest: RestingWeights

    def unshard(self) -> object:
        """Start to gather the full weights."""

    def wait_unshard(self) -> object:
        """Wait for the gather and let parameters be read."""

    def make_readable(self, name: str) -> Any:
        """Called by the guard."""

    @property
    def is_replicated(self) -> bool:
        """Whether the full weights rest."""


def gathers_alone(group: GatheredGroup) -> bool:
    """Whether this rank can gather the full weights without another rank or memory, and then keep them. Local."""
    return group.axes.shard.size == 1 and group.rest.shard.tier is Tier.DEVICE


def leave_elements(group: GatheredGroup) -> None:
    """Called when `group` is dropped: parameters that others still hold keep their elements, if it can gather them alone."""
    left = [p for p in group.params if is_left(p, group)] if gathers_alone(group) else []
    if left:
        others = [p for p in group.params if is_guarded(p) and all(p is not own for own in left)]
        group.unshard()
        group.wait_unshard()
        for p in others:  # of another model by now, which has freed them
            guard(p)
        for p in left:
            unguard(p)
