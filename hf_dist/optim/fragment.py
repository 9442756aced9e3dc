"""This rank's elements of one parameter, as the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hf_dist.offload.resting import Tier
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.layout import ParamSlot


class OfParameter(Protocol):
    """Something of one parameter."""

    @property
    def group(self) -> FlatGroup:
        """Where it rests."""

    @property
    def index(self) -> int:
        """Position in the group."""


Used = Callable[[OfParameter], bool]
"""Whether a parameter had a gradient on any rank."""


@dataclass(eq=False)
class Fragment:
    """A piece of `group.source`."""

    name: str
    """Full parameter name."""
    tensor: nn.Parameter
    """1-D fp32, view of `group.source`; empty between steps if that rests on disk."""
    group: FlatGroup
    index: int
    """Position of the parameter in `group`."""
    start: int
    """First element in `group.source` and `group.grad`."""
    stop: int

    @property
    def slot(self) -> ParamSlot:
        """Of the parameter."""
        return self.group.layout.slots[self.index]

    @property
    def first(self) -> int:
        """Where it begins in the flattened parameter."""
        return self.group.resting[0] + self.start - self.slot.offset

    @property
    def shape(self) -> tuple[int, ...]:
        """As the optimizer sees it."""
        return (self.stop - self.start,)

    @property
    def written(self) -> tuple[int, int]:
        """Interval of the flattened parameter whose states this rank writes into a checkpoint, if its group's axes say so."""
        return self.group.layout.fragment(self.slot, self.group.axes.shard.rank)

    def is_like(self, value: Any) -> bool:
        """Whether an optimizer's state has an element for every one of the fragment; a step counter is 0-dimensional."""
        return isinstance(value, torch.Tensor) and value.shape == self.shape and value.dim() > 0


class WholeTensor(Fragment):
    """A parameter that this rank owns (see [Note: owners]): all of it, in its shape, there for the step only."""

    @property
    def first(self) -> int:
        """At the beginning."""
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return self.slot.shape

    @property
    def written(self) -> tuple[int, int]:
        """All of it: nobody else has states of it."""
        return 0, self.slot.numel


def make_fragments(groups: list[FlatGroup]) -> list[Fragment]:
    """One per parameter of `groups` of which this rank holds an element."""
    fragments = []
    for group in groups:
        on_disk = group.master.tier is Tier.DISK
        for index, slot in enumerate(group.layout.slots):
            start, stop = group.fragment(slot)
            if stop > start:
                values = torch.empty(0) if on_disk else group.source[start:stop]
                tensor = nn.Parameter(values, requires_grad=True)
                fragments.append(Fragment(slot.name, tensor, group, index, start, stop))
    return fragments


@contextmanager
def lent(fragments: Iterable[Fragment]) -> Iterator[None]:
    """Inside, each of `fragments` has its part of the reduced gradient, if there is one, as `.grad`. Local."""
    borrowers = [f for f in fragments if f.group.grad is not None]
    for f in borrowers:
        assert f.group.grad is not None
        f.tensor.grad = f.group.grad[f.start : f.stop].to(f.tensor.dtype)
    try:
        yield
    finally:
        for f in borrowers:
            f.tensor.grad = None
