"""A prepared model becomes an ordinary one again, so that another Trainer, accelerator or engine can take it over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.full_params import whole_tensors
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import unguard
from hf_dist.sharding.keeper import keep_traces, shards_of, traces_of
from hf_dist.sharding.prepared import OWNER, forget_gradients, set_raw_data
from hf_dist.sharding.prepared import unprepare as own_class
from hf_dist.sharding.traces import Traces, look, remove_hooks

__all__ = ["taking_over", "unprepare"]

P = ParamSpec("P")
R = TypeVar("R")
_CUTS = {"pp": "pipeline stages", "tp": "tensor parallelism", "cp": "sequence parallelism", "ep": "expert parallelism"}


def unprepare(model: nn.Module) -> None:
    """Give `model` its whole weights back, in the dtype it was loaded in, and take every hook of ours off it.

    Collective: every rank of the job calls it, with the object that was prepared. Each rank then holds all weights, as under
    DDP. Engines and Trainers of the model cannot train it any more. Nothing happens to a model that is not prepared. Raises
    `ModelError` for a model that is cut into stages or along tp, cp or ep, and for quantised ones.
    """
    sharded = shards_of(model)
    if sharded is None:
        return
    cuts = [words for axis, words in _CUTS.items() if sharded.mesh.axes.size(axis) > 1]
    if cuts or getattr(model, "is_quantized", False):
        raise ModelError(
            f"{type(model).__name__} was prepared with {' and '.join(cuts) or 'quantised weights'}, and cannot be prepared a "
            "second time in this process. Save it with save_pretrained and load it again with from_pretrained."
        )
    sharded.synchronize_buffers()
    forget_gradients(model)
    for group in sharded.groups:
        _give_back(group, [tensor.clone() for _, tensor in whole_tensors(group)])
    traces = traces_of(model)
    if traces is not None:
        traces.undo(model)


@torch.no_grad()
def _give_back(group: FlatGroup, values: list[torch.Tensor]) -> None:
    """`values`: whole, one for each parameter of the group."""
    group.wait_unshard()
    for param, value in zip(group.params, values, strict=True):
        unguard(param)
        own_class(param)
        delattr(param, OWNER)
        remove_hooks(param)
        set_raw_data(param, value)


def taking_over(build: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Have `build(model, ...)`, which prepares a model, take it from whoever has prepared it before."""

    @functools.wraps(build)
    def wrapped(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        unprepare(model)
        before: dict[str, dict[str, Any]] = look(model)
        result = build(model, *args, **kwargs)
        keep_traces(model, Traces.between(before, model))
        return result

    return wrapped
