"""This rank's elements of one parameter, as the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_dist.memory.offload.resting import Tier
from hf_dist.optim.stand_in import OwnCalls, StandIn, lend
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.layout import ParamSlot


class OfParameter(Protocol):
    """An object that belongs to one parameter."""

    @property
    def group(self) -> FlatGroup:
        """The parameter's group."""

    @property
    def index(self) -> int:
        """The parameter's position in the group."""


Used = Callable[[OfParameter], bool]
"""Whether a parameter had a gradient on any rank."""


@dataclass(eq=False)
class Fragment:
    """This rank's elements of one parameter, an interval of `group.source`."""

    name: str
    """Full parameter name."""
    tensor: StandIn
    """1-D fp32 view of `group.source`; empty between steps if `group.source` is on disk."""
    group: FlatGroup
    index: int
    """Position of the parameter in `group`."""
    start: int
    """Index of its first element in `group.source` and `group.grad`."""
    stop: int

    @property
    def slot(self) -> ParamSlot:
        """The parameter's slot."""
        return self.group.layout.slots[self.index]

    @property
    def first(self) -> int:
        """Index of its first element in the flattened parameter."""
        return self.group.resting[0] + self.start - self.slot.offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `tensor`, as the optimizer sees it."""
        return (self.stop - self.start,)

    @property
    def written(self) -> tuple[int, int]:
        """Interval of the flattened parameter whose states this rank writes to a checkpoint, if `group.axes.owns`."""
        return self.group.layout.fragment(self.slot, self.group.axes.place)

    def is_like(self, value: object) -> bool:
        """Whether a state has one value per element of the fragment; a step counter is 0-dimensional and does not."""
        return isinstance(value, torch.Tensor) and value.shape == self.shape and value.dim() > 0


class WholeTensor(Fragment):
    """A whole parameter that this rank owns ([Note: owners]), in its own shape; it has memory only during the step."""

    @property
    def first(self) -> int:
        """0: it starts at the parameter's beginning."""
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.slot.shape

    @property
    def written(self) -> tuple[int, int]:
        """The whole parameter: no other rank has states of it."""
        return 0, self.slot.numel


def make_fragments(groups: list[FlatGroup], calls: OwnCalls) -> list[Fragment]:
    """One fragment for each parameter of `groups` of which this rank holds an element. Local."""
    fragments = []
    for group in groups:
        on_disk = group.master.tier is Tier.DISK
        for index, slot in enumerate(group.layout.slots):
            start, stop = group.fragment(slot)
            if stop > start:
                values = torch.empty(0) if on_disk else group.source[start:stop]
                tensor = StandIn.of(group.params[index], values, calls)
                fragments.append(Fragment(slot.name, tensor, group, index, start, stop))
    return fragments


@contextmanager
def lent(fragments: Iterable[Fragment]) -> Iterator[None]:
    """Set `.grad` of each fragment to its part of the reduced gradient, if there is one, inside the block. Local."""
    borrowers = [f for f in fragments if f.group.grad is not None]
    for f in borrowers:
        assert f.group.grad is not None
        lend(f.tensor, f.group.grad[f.start : f.stop].to(f.tensor.dtype))
    try:
        yield
    finally:
        for f in borrowers:
            lend(f.tensor, None)
