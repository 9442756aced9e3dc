"""Turns a prepared model into an ordinary one again, so that another Trainer, accelerator or engine can use it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn

from hf_dist.dist.collective_guard import every_rank
from hf_dist.errors import ModelError
from hf_dist.log import say
from hf_dist.sharding.full_params import all_tensors
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import let_idle_models_change, unguard
from hf_dist.sharding.ownership import keep_traces, prepared_in, shards_of, traces_of
from hf_dist.sharding.param_slice import forget_slice
from hf_dist.sharding.pickled import forget_copies
from hf_dist.sharding.pipeline_share import PipelineShare
from hf_dist.sharding.prepared import OWNER, forget_gradients, set_raw_data
from hf_dist.sharding.prepared import unprepare as own_class
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.undo_log import Traces, look, remove_hooks

__all__ = ["made_ordinary", "taking_over", "unprepare"]

P = ParamSpec("P")
R = TypeVar("R")


def unprepare(model: nn.Module) -> None:
    """Restore the whole weights of `model`, in the dtype it was loaded in, and remove all our hooks.

    Collective: every rank of the job calls it with the prepared object, or with a model that contains it (adapters or a new
    head around it). Each rank then holds all weights, as under DDP. Its former engines and Trainers can no longer train it. A
    no-op for a model that is not prepared. Raises `ModelError` for a quantised model.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"unprepare: expected a model, found {type(model).__name__}: {model!r:.80}")
    for part in prepared_in(model):
        _unprepare(part)


def _unprepare(part: nn.Module) -> None:
    """`part`: the model that was prepared, or what is left of it."""
    sharded = shards_of(part)
    assert sharded is not None
    model = sharded.model
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"{type(model).__name__} was prepared with quantised weights, and cannot be prepared a second time in this "
            "process. Save it with save_pretrained and load it again with from_pretrained."
        )
    sharded.synchronize_buffers()
    forget_gradients(model)
    values = {name: tensor.clone() for name, tensor in all_tensors(sharded)}
    for group in sharded.groups:
        _give_back(group, values)
    if sharded.pipeline is not None:
        _bring_back(model, sharded.pipeline, values)
    traces = traces_of(part)
    if traces is not None:
        traces.undo(model)


@torch.no_grad()
def _give_back(group: FlatGroup, values: Mapping[str, torch.Tensor]) -> None:
    """Turn the group's parameters into ordinary ones. `values`: whole tensors, by name. Local."""
    group.full.drain()
    for slot, param in zip(group.layout.slots, group.params, strict=True):
        unguard(param)
        own_class(param)
        delattr(param, OWNER)
        forget_slice(param)
        forget_copies(param)
        remove_hooks(param)
        set_raw_data(param, values[slot.name])


def _bring_back(model: nn.Module, share: PipelineShare, values: Mapping[str, torch.Tensor]) -> None:
    """Put the parameters of other stages back into `model`, as the same objects if those still exist. Local."""
    names = {id(twin): name for name, twin in share.whole.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for path, before in share.whole.named_modules():
        module = model.get_submodule(path)
        own = dict(module._parameters)
        module._parameters.clear()
        for attribute, twin in before._parameters.items():
            if twin is not None and attribute not in own:
                module.__dict__.pop(attribute, None)  # its stand-in
                if id(twin) not in made:
                    made[id(twin)] = _from_elsewhere(share, names[id(twin)], values)
            module._parameters[attribute] = None if twin is None else own.get(attribute, made.get(id(twin)))
        module._parameters.update({name: param for name, param in own.items() if name not in module._parameters})


def _from_elsewhere(share: PipelineShare, name: str, values: Mapping[str, torch.Tensor]) -> nn.Parameter:
    known = share.elsewhere[name]()
    if known is None:
        return nn.Parameter(values[name], requires_grad=dict(share.whole.named_parameters())[name].requires_grad)
    known.data = values[name]
    return known


def taking_over(build: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorator for `build(model, ...)`, which prepares a model: first undoes an earlier preparation of the model."""

    @functools.wraps(build)
    def wrapped(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        unprepare(model)
        before = look(model)
        result = build(model, *args, **kwargs)
        let_idle_models_change(model, functools.partial(_of_reference, weakref.ref(model)))
        keep_traces(model, Traces.between(before, model))
        return result

    return cast("Callable[Concatenate[nn.Module, P], R]", wrapped)


def _in_use(sharded: ShardedModel) -> bool:
    return sharded.listener.now.in_use()


def _of_reference(reference: weakref.ref[nn.Module], method: str) -> bool:
    model = reference()
    name = {"_apply": "to(), half() or the like"}.get(method, f"{method}()")
    return model is not None and made_ordinary(model, f"model.{name}")


def made_ordinary(model: nn.Module, call: str) -> bool:
    """Unprepare a model that nobody trains, because user code makes this `call`; False for any other. Collective."""
    sharded = shards_of(model)
    if sharded is None:
        return False
    if _in_use(sharded):
        gc.collect()  # an engine that user code has dropped is part of a cycle; every rank shall find the same
        if _in_use(sharded):
            return False
    every_rank(sharded.mesh, call)
    say(f"{call} after training: {type(model).__name__} becomes an ordinary model, with whole weights on every rank")
    unprepare(model)
    return True
