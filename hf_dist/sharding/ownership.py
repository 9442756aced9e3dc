"""Keeps the shards alive with their model, so that it runs, saves and generates after its engine is gone, as under DDP.

Each module that contains every unit holds the `ShardedModel`, which refers to the model weakly. Without a cycle, the buffers
are freed as soon as the last reference to the model goes. A copy of the model has plain parameters and holds no shards.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.pickled import make_copies_ordinary
from hf_dist.sharding.undo_log import Traces
from hf_dist.sharding.units import containers

__all__ = ["check_owner", "keep_shards", "keep_traces", "prepared_in", "shards_of", "traces_of"]

ShardedModel = Any
"""The class in `runtime.py`; importing it here would be circular."""
_NAME = "_hf_dist_shards"


class _Keeper:
    """Holds the shards for a module. Empty in the planner's copy; other copies have none (`pickled.py`)."""

    def __init__(self, sharded: ShardedModel | None) -> None:
        self.sharded = sharded
        self.traces: Traces | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> _Keeper:
        return _Keeper(None)


def keep_shards(model: nn.Module, sharded: ShardedModel) -> None:
    """Make `model`, and each submodule that contains all units, hold `sharded`. Local."""
    for module in containers(model, sharded.units):
        module.__dict__[_NAME] = _Keeper(sharded)


def shards_of(model: nn.Module) -> ShardedModel | None:
    """The shards of a prepared model, or of a submodule that contains all its units; None for any other module. Local."""
    keeper = model.__dict__.get(_NAME)
    return keeper.sharded if isinstance(keeper, _Keeper) else None


def prepared_in(model: nn.Module) -> list[nn.Module]:
    """The outermost prepared modules of `model`: itself, one that adapters or a head were put around, or several. Local."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if (sharded := shards_of(module)) is not None:
            found.setdefault(id(sharded), module)
    return list(found.values())


def keep_traces(model: nn.Module, traces: Traces) -> None:
    """Remember what preparing `model` has left on it, also where only a part of it is kept. Local."""
    sharded = shards_of(model)
    for module in model.modules():
        keeper = module.__dict__.get(_NAME)
        if isinstance(keeper, _Keeper) and keeper.sharded is sharded:
            keeper.traces = traces
    if sharded is not None:
        make_copies_ordinary(model, sharded, traces)


def traces_of(model: nn.Module) -> Traces | None:
    """The record of what preparing `model` changed on it; None if unknown (the preparation failed). Local."""
    keeper = model.__dict__.get(_NAME)
    return keeper.traces if isinstance(keeper, _Keeper) else None


def check_owner(model: nn.Module, sharded: ShardedModel | None) -> None:
    """Raise `ModelError` if `model` was since unprepared or prepared again, so that it no longer runs on `sharded`. Local."""
    if shards_of(model) is not sharded:
        raise ModelError(
            f"{type(model).__name__} was taken over by another Trainer, accelerator or hf_dist.unprepare: this one can no "
            "longer train it. Create a new one for the model."
        )
