"""A library's own save code runs on whole weights, on the rank that writes.

All ranks write their shards only where the names in the files are known beforehand: HF's `Trainer._save` and
`save_pretrained`, PEFT's, and `state_dict()` of a plain module. Other save code (sentence-transformers, wrappers with a value
head, `_save` of a user's Trainer) chooses what it writes, so it finds the model as it would be without sharding.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dist.dist.collective_guard import every_rank
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError
from hf_dist.hf.peft import converting
from hf_dist.hf.state_dict import full_state_dict
from hf_dist.log import warn_once
from hf_dist.sharding.full_params import all_tensors, full_tensors
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.units import containers

__all__ = ["full_weights_here", "full_weights_on_main", "keep_adapters", "let_save_pretrained", "own_way"]

_LENT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose modules hold whole weights at this moment."""
_ADAPTERS: weakref.WeakKeyDictionary[nn.Module, tuple[int, dict[str, torch.Tensor]]] = weakref.WeakKeyDictionary()
"""By model with adapters, on the rank that writes: trained weights of the last save, and how often they had changed by then."""
_WEIGHTS = {"model", "model_wrapped", "deepspeed", "accelerator"}
"""Attributes of a Trainer through which code can reach the weights."""


def own_way(sharded: ShardedModel, trainer: object = None) -> str:
    """The code that decides what this model's files hold, such as `Trainer._save`; "" for HF's and PEFT's. Local.

    `trainer`: the Trainer that saves the model. Without one only the model's `save_pretrained` counts.
    """
    for method in ("save_model", "_save") if trainer is not None else ():
        for cls in type(trainer).__mro__:
            if cls.__module__ == "transformers.trainer":
                break
            written = vars(cls).get(method)
            if written is not None and not cls.__module__.startswith("hf_dist.") and not _hands_on(written, method):
                return f"{cls.__name__}.{method}"
    model = sharded.model
    if hasattr(model, "save_pretrained") and (trainer is None or isinstance(model, _supported())):
        return own_save_pretrained(model)
    # HF's Trainer and `accelerator.save_model` write what `state_dict()` returns.
    return "" if _says_names(sharded.whole) else f"{type(model).__name__}.state_dict"


def own_save_pretrained(model: nn.Module) -> str:
    """The name of the model's `save_pretrained`; "" for HF's and PEFT's, whose names in files are known. Local."""
    function = inspect.unwrap(type(model).save_pretrained)  # type: ignore[attr-defined]
    known = function.__module__ in ("transformers.modeling_utils", "peft.peft_model")
    return "" if known else str(function.__qualname__)


def keep_adapters(engine: Engine) -> None:
    """Let the main rank save adapters alone until weights change. Collective.

    Callbacks in `on_save`, and scripts after `trainer.save_model()`, run `if args.should_save: model.save_pretrained(...)`.
    Does nothing for a model without adapters, or if each rank has all weights.
    """
    sharded = engine.sharded
    if sharded.is_spread and any(_is_peft(m) for m in containers(sharded.model, sharded.units)):
        writes = sharded.mesh.world.rank == 0
        found = {name: t.detach().to("cpu", copy=True) for name, t in all_tensors(sharded, frozen=False) if writes}
        _ADAPTERS[sharded.model] = (_changes(sharded), found)


def _kept_adapters(sharded: ShardedModel) -> dict[str, torch.Tensor] | None:
    changes, found = _ADAPTERS.get(sharded.model, (0, None))
    return found if changes == _changes(sharded) else None


def _changes(sharded: ShardedModel) -> int:
    return sum(group.rest.version for group in sharded.trainable_groups)


def _is_peft(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _below(root: nn.Module, part: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` of `root`, renamed to the names that `part` has for the same parameters."""
    whole = dict(root.named_parameters(remove_duplicate=False))
    own = {id(p): name for name, p in part.named_parameters()}
    return {own[id(whole[name])]: tensor for name, tensor in state.items() if id(whole[name]) in own}


def _supported() -> tuple[type, ...]:
    """Classes that HF's Trainer saves with `save_pretrained`."""
    peft = sys.modules.get("peft")
    return (PreTrainedModel,) if peft is None else (PreTrainedModel, peft.PeftModel)


def _says_names(model: nn.Module) -> bool:
    """Whether `state_dict()` contains the parameters under their own names."""
    names = {id(param): {name} for name, param in model.named_parameters()}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].add(name)
    try:
        state = model.state_dict(keep_vars=True)
    except TypeError:  # an override without the arguments of `nn.Module.state_dict`
        return False
    return all(name in names.get(id(value), {name}) for name, value in state.items()) and {
        id(value) for value in state.values()
    } >= set(names)


def _hands_on(function: Any, name: str) -> bool:
    """Whether a method calls its base and does not use the model itself."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    found = set(_names(code)) if code is not None else set()
    return {"super", name} <= found and not found & _WEIGHTS


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@contextmanager
def full_weights_on_main(sharded: ShardedModel, part: nn.Module | None = None, *, keep: bool = True) -> Iterator[None]:
    """Inside, the modules of the model hold whole weights on the CPU, in the dtype they were loaded in.

    Collective at entry: every rank enters. On ranks with `keep=False` nothing changes. `part`: a module made of parameters of
    the model (for example a base model whose adapters were merged). Writes into the weights are lost. Raises
    `CheckpointError` on every rank for a model split into pipeline stages. Nested calls do nothing.
    """
    if sharded.model in _LENT:
        yield
        return
    if sharded.mesh.pp.size > 1:
        raise CheckpointError(
            f"{type(sharded.model).__name__} has its own save code, which needs all weights in one place, but it is split "
            "into pipeline stages. Save with trainer.save_model() of HF's Trainer, or without pipeline.stages."
        )
    sharded.synchronize_buffers()
    full = {}
    held = {slot.name: p for g in sharded.groups for slot, p in zip(g.layout.slots, g.params, strict=True)}
    for name, tensor in all_tensors(sharded):
        if keep:
            full[id(held[name])] = nn.Parameter(tensor.detach().to("cpu", copy=True), requires_grad=False)
    with _put(sharded, part, full):
        yield


@contextmanager
def full_weights_here(sharded: ShardedModel, *, rounded_only: bool = False) -> Iterator[None]:
    """`lent` without the other ranks, for weights that this rank holds whole, in the dtype they were loaded in. Local.

    Where fp32 masters are spread over the ranks, the values are the rounded ones that the model computes with; a log line says
    so. `rounded_only`: lend only weights that the model computes with in another dtype, and leave the others in place.
    """
    full = {}
    groups = [g for g in sharded.groups if not rounded_only or _is_rounded(g)]
    for group in groups:
        tensors = (
            full_tensors(group)
            if group.resting == (0, group.layout.numel)
            else zip(group.layout.slots, group.params, strict=True)
        )
        for param, dtype, (_, tensor) in zip(group.params, group.loaded_dtypes, tensors, strict=True):
            full[id(param)] = nn.Parameter(tensor.detach().to("cpu", dtype, copy=True), requires_grad=False)
    rounded = next((g for g in groups if _is_rounded(g) and g.resting != (0, g.layout.numel)), None)
    if rounded is not None:
        warn_once(
            f"model.save_pretrained() writes weights rounded to {rounded.dtype}, as this rank has them: their fp32 masters "
            "are spread over the ranks. trainer.save_model(), called by every rank, writes those"
        )
    with _put(sharded, None, full):
        yield


def _is_rounded(group: FlatGroup) -> bool:
    """Whether the model computes with less than it was loaded with."""
    return any(dtype != group.dtype for dtype in group.loaded_dtypes)


@contextmanager
def _put(sharded: ShardedModel, part: nn.Module | None, full: dict[int, nn.Parameter]) -> Iterator[None]:
    """Inside, `full` (by id of the replaced parameter) are the modules' parameters, and forwards send nothing, because
    sentence-transformers runs the model for its model card."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    roots = [sharded.model] if part is None else [sharded.model, part]
    modules = {id(m): m for root in roots for m in root.modules()} if full else {}
    try:
        for module in modules.values():
            for name, param in module._parameters.items():
                if param is not None and id(param) in full:
                    replaced.append((module._parameters, name, param))
                    whole = full[id(param)]
                    whole.requires_grad_(param.requires_grad)
                    module._parameters[name] = whole
        _LENT.update(roots)
        sharded.passes.paused = True
        yield
    finally:
        sharded.passes.paused = False
        for root in roots:
            _LENT.discard(root)
        for parameters, name, param in replaced:
            parameters[name] = param


def let_save_pretrained(engine: Engine) -> None:
    """Make `save_pretrained` of the prepared model, and of modules that contain all its units, write whole weights. Local.

    For sharded weights `save_pretrained` becomes collective: every rank calls it, as in accelerate scripts, and the main rank
    writes. For whole weights each rank that calls it writes, as under DDP.
    """
    for module in containers(engine.model, engine.sharded.units):
        if hasattr(module, "save_pretrained"):
            instead = functools.partial(_save_pretrained, weakref.ref(engine.sharded), weakref.ref(engine))
            replace_method(module, "save_pretrained", instead)


def _save_pretrained(
    shards: weakref.ref[ShardedModel], trainer: weakref.ref[Engine], model: Any, *args: object, **kwargs: Any
) -> object:
    sharded, engine = shards(), trainer()

    def stock(**more: object) -> object:
        with converting(model, kwargs.get("path_initial_model_for_weight_conversion")):
            return type(model).save_pretrained(model, *args, **kwargs, **more)

    if sharded is None:
        return stock()
    writes = sharded.mesh.world.rank == 0
    if sharded.model in _LENT or kwargs.get("state_dict") is not None:
        return stock() if writes or not sharded.is_spread else None
    if not sharded.is_spread:
        with full_weights_here(sharded, rounded_only=not own_save_pretrained(model)):
            return stock()
    adapters = _kept_adapters(sharded) if _is_peft(model) else None
    if adapters is not None:
        return stock(state_dict=_below(sharded.model, model, adapters)) if writes else None
    every_rank(sharded.mesh, "model.save_pretrained()")
    if engine is not None:
        engine.synchronize_replicas()
    if sharded.mesh.pp.size > 1 and not own_save_pretrained(model):
        state = full_state_dict(sharded, keep=writes)
        return stock(state_dict=state) if writes else None
    with full_weights_on_main(sharded, model, keep=writes):
        return stock() if writes else None
