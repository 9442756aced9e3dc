"""Which tier holds each state of a group and how many bytes it takes, decided from the layout before any allocation.

`FlatGroup` allocates from this plan and the memory estimate sums it, so the arithmetic exists once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_dist.memory.offload.nvme import disk_nbytes
from hf_dist.memory.offload.resting import Tier
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.placement import Placement, StatePlacements
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.wires import WHOLE, GroupWires, is_usual


@dataclass(frozen=True)
class TensorAtRest:
    """One 1-D tensor at rest."""

    tier: Tier
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its tier; whole pages on disk."""
        return disk_nbytes(self.numel, self.dtype) if self.tier is Tier.DISK else self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class GroupAtRest:
    """The tensors of one group on one rank."""

    interval: tuple[int, int]
    """Part of the flat buffer covered by this rank's master weights (by the weights themselves, if frozen)."""
    gathered: tuple[int, int]
    """Part of it that this rank contributes to the all-gather: `interval`, or the whole shard if that is a piece of one."""
    whole: bool
    """Whether the full buffer rests: `placements` says so, or this rank's shard is everything and needs no cast."""
    separate: bool
    """Whether the all-gather's input is its own tensor, copied into the full buffer first, and not a part of that buffer."""
    shard: TensorAtRest | None
    """The all-gather's input, if it needs its own tensor; None if a part of the full buffer or the masters serve."""
    master: TensorAtRest | None
    """The master weights, if they need their own tensor; None if the optimizer steps the all-gather's input."""
    gradient: TensorAtRest
    """The reduced gradient. Device memory is freed after each step; host memory is kept."""
    second: TensorAtRest | None = None
    """This rank's part of a second copy of the weights."""
    awaiting: TensorAtRest | None = None
    """The gradient of a shard of which the optimizer reads a piece: from a backward to the end of the window. Where ranks send
    momentum, this rank's own of everything, if the optimizer reads a shard."""
    wires: GroupWires = WHOLE
    """In which codecs its messages travel."""

    @property
    def keeps_encoded(self) -> bool:
        """Whether the shard is kept as it is sent until the weights change: cast once for all gathers of a window. Not where it
        rests on the host, which is to save memory here."""
        return self.wires.of_products and (self.shard is None or self.shard.tier is Tier.DEVICE)

    @property
    def is_cut(self) -> bool:
        """Whether the masters are a piece of a shard, which other copies hold the rest of."""
        return self.interval != self.gathered

    @property
    def awaited(self) -> tuple[int, int]:
        """Part of the flat buffer that `awaiting` covers."""
        return self.gathered if self.awaiting is None or self.is_cut else (0, self.awaiting.numel)

    @property
    def arrives_rounded(self) -> bool:
        """Whether the full weights are what arrives of encoded messages, so that masters are never a part of them."""
        return self.wires.weights is not None or (self.is_cut and self.wires.copies is not None)


def plan_at_rest(
    layout: FlatLayout,
    place: int,
    trainable: bool,
    dtype: torch.dtype,
    *,
    frozen: torch.dtype,
    placements: StatePlacements,
    storage: Storage,
    precision: Precision,
    spread: bool = False,
) -> GroupAtRest:
    """Plan one group on the rank that has piece `place` of it. Call it for the groups in the order of the units. Local.

    `dtype`: compute dtype of the weights. `frozen`: dtype in which frozen weights rest, wider if they were loaded in a wider
    one, so that a checkpoint has their bits. `spread`: whether other ranks hold other slices of them (experts). Where none has
    the same ones, there is nothing to gather, and what rests in the dtype of use is read where it rests; not in a job of one
    process, which behaves as one of many. The order matters because `storage` counts what it has handed out (`ratio`,
    `max_in_cpu`).
    """
    rounded = not trainable and frozen != dtype
    rests = placements.optim if trainable else Placement.SHARD if rounded else placements.params
    sharded, everything = rests is Placement.SHARD, (0, layout.numel)
    interval = layout.piece(place) if sharded else everything
    gathered = layout.shard(place // layout.pieces) if sharded else everything
    numel, held = interval[1] - interval[0], gathered[1] - gathered[0]
    cut = layout.pieces > 1
    rests_sharded = placements.params is Placement.SHARD
    several = layout.num_shards > 1
    wires = placements.wires.of_group(
        trainable=trainable,
        gathers=several and (rests_sharded or (trainable and sharded)),
        reduces=several,
        usual=is_usual(dtype, precision.compute),
        multiplied=layout.slots[0].name in precision.float8,
    )
    second = None
    if rests_sharded and 1 < placements.second < layout.num_shards:
        second = TensorAtRest(Tier.DEVICE, layout.numel // placements.second, dtype)
        if wires.second and wires.weights is not None:
            rows = layout.num_shards // placements.second
            second = replace(second, numel=rows * wires.weights.nbytes(layout.shard_numel), dtype=torch.uint8)
    tier = storage.optim_tier(numel) if trainable else Tier.DEVICE
    params_tier = storage.params_tier(held) if rests_sharded else Tier.DEVICE
    stepped = precision.master_dtype(dtype)
    wide = stepped if trainable else frozen
    here = tier is Tier.DEVICE and params_tier is Tier.DEVICE
    whole = not rests_sharded or (spread and layout.num_shards == 1 and here and dtype == wide)
    rounds = wires.weights is not None or (cut and wires.copies is not None)  # see `arrives_rounded`
    separate = not whole or rounded or rounds or (trainable and not cut and tier is Tier.DEVICE and dtype != stepped)
    shard = master = None
    if cut:  # what the gathers read has other copies' pieces in it, which no masters here could serve
        master = TensorAtRest(tier, numel, wide)
        shard = TensorAtRest(params_tier, held, dtype) if separate else None
    elif not separate:
        master = None if here else TensorAtRest(tier, numel, wide)
    elif here or not trainable:
        shard = TensorAtRest(params_tier, numel, wide)
    else:
        master = TensorAtRest(tier, numel, wide)
        same = tier is params_tier is Tier.HOST and dtype == wide
        shard = None if same else TensorAtRest(params_tier, numel, dtype)
    gradient = TensorAtRest(Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST, numel, precision.grads)
    awaiting = replace(gradient, numel=held) if cut else None
    if wires.momentum is not None and sharded:
        awaiting = replace(gradient, numel=layout.numel)
    return GroupAtRest(interval, gathered, whole, separate, shard, master, gradient, second, awaiting, wires)
