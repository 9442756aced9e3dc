"""The tensors of one group at rest, allocated from the plan in `at_rest.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_dist.memory.offload.host import Gradient
from hf_dist.memory.offload.resting import Resident, Resting, Tier
from hf_dist.memory.offload.storage import Shelf, Storage
from hf_dist.sharding.at_rest import GroupAtRest, TensorAtRest
from hf_dist.sharding.pieces import ShardGradient


@dataclass(frozen=True)
class States:
    """What the gathers read, what the optimizer steps and reads."""

    shard: Resting
    """The all-gather's input."""
    master: Resting
    """The weights that are stepped; `shard` itself where a wider copy gains nothing."""
    gradient: Gradient
    """The reduced gradient."""
    awaiting: ShardGradient | None = None
    """That of the whole shard, of which `gradient` gets a piece."""


def states_of(at_rest: GroupAtRest, full: torch.Tensor, storage: Storage, grads: torch.dtype) -> States:
    """Allocate the plan. `full`: the flat buffer, 1D; `grads`: dtype of the reduced gradient. Local.

    One tensor serves as both weights where a second gains nothing. On the device the gather casts on the way, so it reads the
    masters. On the host they share only if the dtypes are equal: else a narrow copy halves the bytes sent to the device.
    If weights rest replicated, the gather's input is a part of `full` itself.
    """

    def new(shelf: Shelf, plan: TensorAtRest | None) -> Resting | None:
        return None if plan is None else shelf.new(plan.numel, plan.dtype, plan.tier)

    wide = new(storage.optim, at_rest.master)
    shard: Resting
    if at_rest.separate:
        chosen = wide if at_rest.shard is None else new(storage.params, at_rest.shard)
        assert chosen is not None
        shard = chosen
    else:
        shard = Resident(full[slice(*at_rest.gathered)], Tier.DEVICE)
    gradient = storage.gradient(at_rest.gradient.tier, at_rest.gradient.numel, grads)
    whole = at_rest.awaiting
    awaiting = None if whole is None else ShardGradient(storage.gradient(whole.tier, whole.numel, grads))
    return States(shard, shard if wide is None else wide, gradient, awaiting)
