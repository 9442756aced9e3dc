"""What a plan knows of a unit: its groups of parameters, and their bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_dist.dist.low_rank import Matrix, matrices_of
from hf_dist.memory.offload.resting import Tier
from hf_dist.sharding.at_rest import GroupAtRest
from hf_dist.sharding.layout import FlatLayout


@dataclass(frozen=True)
class PlannedGroup:
    """The properties of a `FlatGroup` that determine its bytes."""

    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    at_rest: GroupAtRest
    copies: tuple[str, int] | None = None
    """For parameters that other ranks of `tp` also hold: how gradients are combined, over how many neighbours (0: all)."""

    @property
    def factors(self) -> tuple[tuple[Matrix, ...], tuple[tuple[int, int], ...]]:
        """(matrices, intervals sent as they are), of a gradient that travels in factors."""
        assert self.at_rest.wires.low_rank is not None
        slots = ((slot.name, slot.shape, slot.offset) for slot in self.layout.slots)
        return matrices_of(slots, self.at_rest.wires.low_rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights in the dtype of use."""
        return self.layout.numel * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedUnit:
    """Groups that are gathered together; the first unit is the root."""

    path: str
    groups: tuple[PlannedGroup, ...]
    needed_in_backward: bool = True
    """Whether its backward reads the weights."""
    stands_first: bool = True
    """For the root: whether it has weights before all blocks (an embedding, also one tied to the head)."""
    stands_last: bool = True
    """For the root: whether it has weights behind all blocks; not in a pipeline stage before the last."""

    @cached_property
    def numel(self) -> int:
        """Number of elements, including padding."""
        return sum(g.layout.numel for g in self.groups)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the weights that are gathered for use."""
        return sum(g.nbytes for g in self.groups if not g.at_rest.whole)

    @cached_property
    def encoded(self) -> int:
        """Bytes of these as they arrive, where gathers are encoded."""
        found = [(g.layout, g.at_rest.wires.weights) for g in self.groups]
        return sum(layout.num_shards * codec.nbytes(layout.shard_numel) for layout, codec in found if codec is not None)

    @cached_property
    def kept_encoded(self) -> int:
        """Bytes of its shard as it is sent, where that is kept from the first gather until the weights change."""
        found = [(g.layout, g.at_rest.wires.weights) for g in self.groups if g.at_rest.keeps_encoded]
        return sum(codec.nbytes(layout.shard_numel) for layout, codec in found if codec is not None)

    @cached_property
    def learning(self) -> int:
        """Number of elements with gradients, including padding."""
        return sum(g.layout.numel for g in self.groups if g.trainable)

    @cached_property
    def reduced(self) -> int:
        """Bytes of reduced gradients on the device."""
        gradients = [g.at_rest.gradient for g in self.groups if g.trainable]
        return sum(g.nbytes for g in gradients if g.tier is Tier.DEVICE)

    @cached_property
    def awaiting(self) -> int:
        """Bytes of reduced gradients on the device in a window: of whole shards, whether or not copies then share them."""
        gradients = [g.at_rest.awaiting or g.at_rest.gradient for g in self.groups if g.trainable]
        return sum(g.nbytes for g in gradients if g.tier is Tier.DEVICE)

    @cached_property
    def newest(self) -> int:
        """Bytes of the largest gradient of one parameter, as autograd creates it."""
        learning = [g for g in self.groups if g.trainable]
        return max((math.prod(s.shape) * g.dtype.itemsize for g in learning for s in g.layout.slots), default=0)
