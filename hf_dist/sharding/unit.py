"""The unit: parameters gathered together, such as a decoder block, an embedding, or the rest of the model (the root unit)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist.dist.ranges import named
from hf_dist.float8.casts import UnitCasts
from hf_dist.float8.linear import is_float8
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.placement import Stay


@dataclass
class Call:
    """One forward of a unit that autograd recorded."""

    has_inputs: bool
    """Whether gradients flow to its inputs. If so, their arrival marks the end of the call's backward."""
    started_in: int = 0
    """Number of the last backward (counted from 1) that reached this call; 0 for none."""


@dataclass(eq=False)
class ShardUnit:
    """The groups of one unit, and its state in the current backward."""

    index: int
    name: str
    """Module path, empty for the root unit."""
    modules: list[nn.Module]
    """The module whose forward uses the unit; for the root unit every module that owns one of its parameters."""
    groups: list[FlatGroup]
    is_root: bool = False
    stay: Stay = Stay.USE
    """How long its gathered weights are kept. Equal on every rank of `dp`; changed only between passes."""
    open_calls: int = 0
    """Number of calls whose backward has started but not yet reached their inputs."""
    waiting: set[tuple[int, int]] = field(default_factory=set)
    """(group, index) of trainable parameters whose gradient has not arrived in this backward."""
    complete: bool = False
    """Whether all gradients of this backward have arrived."""
    idle: bool = False
    """Whether this backward's gradients need no action: they accumulate in `.grad` until a later backward; weights stay."""

    casts: UnitCasts | None = None
    """Its weights in eight bits, where several microbatches read the same ones."""

    def __post_init__(self) -> None:
        self.numel = sum(g.layout.numel for g in self.groups)
        self.trainable = [g for g in self.groups if g.trainable]
        self._trainable_slots = {
            (g, i) for g, group in enumerate(self.groups) if group.trainable for i in range(len(group.params))
        }
        self.needed_in_backward = self.is_root or reads_weights_in_backward(self.modules)
        # Backward nodes of a block lead to its inputs or its parameters. When both have their gradients, its weights are no
        # longer needed. The root's nodes lead into other units: a frozen norm is needed after the head's gradient.
        self.frees_early = not self.is_root or all(g.trainable for g in self.groups)
        self.begin_backward()

    def begin_backward(self, *, reduces: bool = True, stays: bool = False) -> None:
        """Expect a gradient from every trainable parameter. Local.

        `reduces`: gradients are reduced after this backward; `stays`: weights are kept after it, unless it ends the window.
        """
        in_place = [group.begin_backward(reduces) for group in self.trainable]
        self.idle = not reduces and stays and all(in_place)
        self.waiting = set(self._trainable_slots)
        self.open_calls = 0
        self.complete = False

    @property
    def fresh(self) -> bool:
        """Whether the current full weights are in memory or in flight."""
        return all(g.full.is_current for g in self.groups)

    def fetch(self) -> None:
        """Start to load resting weights into memory ahead of `unshard`. Local."""
        for group in self.groups:
            group.fetch()

    @property
    def words(self) -> str:
        """Its name in a profile."""
        return self.name or "the rest of the model"

    def unshard(self) -> None:
        """Start to all-gather the weights; idempotent. Collective over the shard axes."""
        with named(f"unshard {self.words}"):
            for group in self.groups:
                group.unshard()

    def wait_unshard(self) -> None:
        """Wait for the gather. Afterwards the parameters can be read. Local."""
        with named(f"wait for the weights of {self.words}"):
            for group in self.groups:
                group.wait_unshard()

    def keep_casts(self) -> None:
        """From now on, cast weights that multiply in float8 once for as long as they stay in memory unchanged. Local."""
        layers = [m for module in self.modules for m in module.modules() if is_float8(m)]
        read = {id(layer.weight) for layer in layers}
        groups = [g for g in self.groups if any(id(p) in read for p in g.params)]

        def versions() -> tuple[int, ...] | None:
            stays = self.stay is Stay.WINDOW or all(g.is_replicated for g in groups)
            written = any(g.full.writes.happened for g in groups)  # the masters' version counts that in the step only
            return tuple(g.full.version for g in groups) if stays and not written else None

        if layers:
            self.casts = UnitCasts(layers, versions)

    def renew_casts(self) -> None:
        """Before a forward, with readable weights. Local."""
        if self.casts is not None:
            self.casts.renew()

    def release_casts(self) -> None:
        """After the weights have changed, so that no second copy of them stays. Local."""
        if self.casts is not None:
            self.casts.release()

    def reshard(self) -> None:
        """Free full weights that rest sharded. Local."""
        for group in self.groups:
            group.reshard()


def reads_weights_in_backward(modules: Sequence[nn.Module]) -> bool:
    """Whether a unit's backward reads its weights: that of an embedding only scatters gradients by index."""
    return not all(isinstance(m, nn.Embedding) for m in modules)


class _PostBackward(torch.autograd.Function):
    """Identity whose backward runs when the gradients of all inputs of one call have been computed."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass `inputs` through."""
        ctx.set_materialize_grads(False)  # None for inputs that the loss ignores: zeros would trigger weight decay
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Call `notify` and pass the gradients through."""
        ctx.notify()
        return (None, *grads)


post_backward: Callable[..., tuple[torch.Tensor, ...]] = _PostBackward.apply
