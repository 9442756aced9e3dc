"""A prepared model keeps its shards: it works, saves and generates after its engine is gone, as under DDP.

The modules that contain every unit hold the `ShardedModel`; it refers to the model weakly. So there is no cycle: when the last
reference to the model goes, its buffers go at once. A copy of the model has plain parameters of its own and keeps nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.traces import Traces
from hf_dist.sharding.units import containers

__all__ = ["check_owner", "keep_shards", "keep_traces", "shards_of", "traces_of"]

ShardedModel = Any
"""That of `runtime.py`, which imports this."""
_NAME = "_hf_dist_shards"


class _Keeper:
    """Holds the shards for a module; empty in copies and in pickles."""

    def __init__(self, sharded: ShardedModel | None = None) -> None:
        self.sharded = sharded
        self.traces: Traces | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Keeper:
        return _Keeper()

    def __reduce__(self) -> tuple[type[_Keeper], tuple[()]]:
        return _Keeper, ()


def keep_shards(model: nn.Module, sharded: ShardedModel) -> None:
    """Have `model`, and what of it contains all units, hold `sharded`. Local."""
    for module in containers(model, sharded.units):
        module.__dict__[_NAME] = _Keeper(sharded)


def shards_of(model: nn.Module) -> ShardedModel | None:
    """The shards of a prepared model, or of a part that contains all its units; None for others. Local."""
    keeper = model.__dict__.get(_NAME)
    return keeper.sharded if isinstance(keeper, _Keeper) else None


def keep_traces(model: nn.Module, traces: Traces) -> None:
    """Remember what preparing `model` has left on it. Local."""
    keeper = model.__dict__[_NAME]
    assert isinstance(keeper, _Keeper)
    keeper.traces = traces


def traces_of(model: nn.Module) -> Traces | None:
    """What preparing `model` has left on it; None where it is not known (a preparation that failed). Local."""
    keeper = model.__dict__.get(_NAME)
    return keeper.traces if isinstance(keeper, _Keeper) else None


def check_owner(model: nn.Module, sharded: ShardedModel) -> None:
    """Raise `ModelError` where `model` has been prepared again since, or unprepared: `sharded` is no longer what it runs on."""
    if shards_of(model) is not sharded:
        raise ModelError(
            f"{type(model).__name__} was taken over by another Trainer, accelerator or hf_dist.unprepare: this one can no "
            "longer train it. Make a new one for it."
        )
