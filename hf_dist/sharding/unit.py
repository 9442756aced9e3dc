"""What is gathered together: a decoder block, an embedding, or the rest of the model (the root unit)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.placement import Stay


@dataclass
class Call:
    """One forward of a unit that autograd recorded."""

    has_inputs: bool
    """Whether a gradient flows to its inputs; then their arrival says that the call's backward is over."""
    started_in: int = 0
    """The backward, counted from 1, that has begun with it; 0 for none."""


@dataclass(eq=False)
class ShardUnit:
    """Groups of one unit, and where it stands in the current backward."""

    index: int
    name: str
    """Module path, empty for the root unit."""
    modules: list[nn.Module]
    """The module whose forward uses the unit; for the root unit every module that owns one of its parameters."""
    groups: list[FlatGroup]
    is_root: bool = False
    stay: Stay = Stay.USE
    """How long its gathered weights are kept; the same on every rank of `dp`, and changed between two passes only."""
    open_calls: int = 0
    """Calls whose backward has started and has not reached their inputs."""
    waiting: set[tuple[int, int]] = field(default_factory=set)
    """(group, index) of trainable parameters without a gradient in this backward."""
    complete: bool = False
    """All gradients of this backward are there."""
    idle: bool = False
    """Nothing follows from this backward's gradients: they wait in `.grad` for the window's end, and the weights stay."""

    def __post_init__(self) -> None:
        self.numel = sum(g.layout.numel for g in self.groups)
        self.trainable = [g for g in self.groups if g.trainable]
        self._trainable_slots = {
            (g, i) for g, group in enumerate(self.groups) if group.trainable for i in range(len(group.params))
        }
        self.needed_in_backward = self.is_root or reads_weights_in_backward(self.modules)
        # Backward nodes of a closed unit lead to its inputs or to its parameters, so both being there means that its
        # weights are done with. The root's lead into other units: a frozen norm is needed after the head's gradient.
        self.frees_early = not self.is_root or all(g.trainable for g in self.groups)
        self.begin_backward()

    def begin_backward(self, *, reduces: bool = True, stays: bool = False) -> None:
        """Expect a gradient from every trainable parameter.

        `reduces`: they are reduced after this backward; `stays`: weights are kept after it, unless it ends the window.
        """
        in_place = [group.begin_backward(reduces) for group in self.trainable]
        self.idle = not reduces and stays and all(in_place)
        self.waiting = set(self._trainable_slots)
        self.open_calls = 0
        self.complete = False

    @property
    def fresh(self) -> bool:
        """Whether the current weights are here or on their way."""
        return all(g.fresh for g in self.groups)

    def fetch(self) -> None:
        """Begin to bring resting weights into memory ahead of `unshard`. Local."""
        for group in self.groups:
            group.fetch()

    def unshard(self) -> None:
        """Start gathering; idempotent. Collective over the shard axes."""
        for group in self.groups:
            group.unshard()

    def wait_unshard(self) -> None:
        """Parameters can be read after this."""
        for group in self.groups:
            group.wait_unshard()

    def reshard(self) -> None:
        """Free what rests sharded."""
        for group in self.groups:
            group.reshard()


def reads_weights_in_backward(modules: Sequence[nn.Module]) -> bool:
    """Whether the weights of a unit are gathered for its backward: an embedding's only scatters gradients by index."""
    return not all(isinstance(m, nn.Embedding) for m in modules)


class _PostBackward(torch.autograd.Function):
    """Identity whose backward runs when the gradients of all inputs of one call have been computed."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass `inputs` through."""
        ctx.set_materialize_grads(False)  # nothing, not zeros, for an input that the loss does not depend on: no decay
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Tell, and pass the gradients through."""
        ctx.notify()
        return (None, *grads)


post_backward = _PostBackward.apply
