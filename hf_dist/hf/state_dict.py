"""A sharded model as a plain state dict, one unit at a time."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.dist.collective_guard import every_rank
from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.sharding.full_params import all_tensors, load_full_tensor, unsharded, whole_tensors
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.units import containers

_LOADING: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
"""Models that are loading weights from a state dict."""


def full_state_dict(sharded: ShardedModel, keep: bool = True) -> dict[str, torch.Tensor]:
    """All weights and persistent buffers on the CPU, under the model's own names, in the dtype they were loaded in.

    Collective: every rank calls it. Ranks with `keep=False` get an empty dict and hold at most one unit. Tied names share
    one tensor, as in `model.state_dict()`.
    """
    whole = sharded.whole
    names: dict[int, list[str]] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in whole.state_dict(keep_vars=True).items():
        state[name] = value  # fixes the order of keys
        names.setdefault(id(value), []).append(name)
    aliases = {name: names.get(id(param), []) for name, param in whole.named_parameters()}
    owned: set[str] = set()
    for name, tensor in all_tensors(sharded):
        owned.update(aliases[name])
        if keep:
            state.update(dict.fromkeys(aliases[name], tensor.detach().to("cpu", copy=True)))
    if not keep:
        return {}
    buffers = sharded.model.state_dict(keep_vars=True)
    for name, value in state.items():
        if name not in owned and isinstance(value, torch.Tensor):
            state[name] = buffers[name].detach().cpu()
    return state


def part_state_dict(engine: Engine, part: nn.Module, keep: bool = True) -> dict[str, torch.Tensor]:
    """`full_state_dict` of one module in its current state (for example after a merge of adapters), under its own names.

    Collective: every rank calls it. Not for a model split into pipeline stages.
    """
    state: dict[str, Any] = dict(part.state_dict(keep_vars=True))
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    for group in engine.sharded.groups:
        if not any(id(p) in names for p in group.params):
            continue
        for param, (_, tensor) in zip(group.params, whole_tensors(group), strict=True):
            if keep and id(param) in names:
                state.update(dict.fromkeys(names[id(param)], tensor.detach().to("cpu", copy=True)))
    return {name: value.detach().cpu() for name, value in state.items()} if keep else {}


def loads_by_itself(engine: Engine) -> bool:
    """Whether the model's class has its own `load_state_dict`, which may do more than fill weights. Local.

    False for a model in pipeline stages, whose parts lack names that such a method expects.
    """
    return engine.mesh.pp.size == 1 and type(engine.model).load_state_dict is not nn.Module.load_state_dict


@contextmanager
def loading(sharded: ShardedModel, module: nn.Module | None = None) -> Iterator[None]:
    """Inside, `load_state_dict` of the model (or PEFT) writes the master weights at the file's full precision.

    Collective: every rank enters, loads the same values, and leaves. Nested calls for the same model do nothing
    (the Trainer loads a folder of adapters through PEFT's `load_adapter`). `module`: the one that loads, if not the model.
    """
    if sharded in _LOADING:
        yield
        return
    own = {id(p): (group, i) for group in sharded.groups for i, p in enumerate(group.params)}

    def keep(module: nn.Module, state: Mapping[str, Any], *_: object) -> None:
        # Runs before the model copies the values into weights of the compute dtype.
        for name, param in module.named_parameters(remove_duplicate=False):
            if name in state and id(param) in own:
                group, index = own[id(param)]
                slot = group.layout.slots[index]
                load_full_tensor(group, slot, state[name])
                if not slot.held.everything and isinstance(state, dict):  # the slice in memory
                    state[name] = slot.held.take(state[name])

    def after(group: FlatGroup, changed: bool) -> None:
        if changed:  # where names in the state differ from the parameters', the masters do not have the values yet
            group.adopt_full()

    handle = (sharded.model if module is None else module).register_load_state_dict_pre_hook(keep)
    _LOADING.add(sharded)
    try:
        with unsharded(sharded.model, after=after, slices=True):
            yield
    finally:
        _LOADING.discard(sharded)
        handle.remove()
    sharded.weights_changed()


def let_load_state_dict(engine: Engine) -> None:
    """Make `load_state_dict` of the prepared model, and of modules that contain all its units, fill the shards. Local.

    For spread weights it becomes collective: every rank calls it, with the same values. For whole weights it stays as it is,
    as inside `gathered`, where one rank may call it.
    """
    for module in containers(engine.model, engine.sharded.units):
        replace_method(module, "load_state_dict", functools.partial(_load_state_dict, weakref.ref(engine.sharded)))


def _load_state_dict(
    shards: weakref.ref[ShardedModel],
    model: nn.Module,
    state_dict: Mapping[str, object],
    strict: bool = True,
    assign: bool = False,
) -> object:
    sharded = shards()
    if sharded is None:
        return type(model).load_state_dict(model, state_dict, strict, assign)
    if assign:
        raise ModelError(
            f"{type(model).__name__}.load_state_dict(assign=True): the model is sharded by hf_dist, and its optimizer would "
            "go on with the parameters that it has. Load with assign=False, which copies the values, or before the model is "
            "prepared."
        )
    load = _load_stages if sharded.mesh.pp.size > 1 else _load_whole
    whole = not sharded.is_spread or sharded.passes.paused or all(group.pins for group in sharded.groups)
    if whole or sharded in _LOADING:
        return load(sharded, model, state_dict, strict)
    every_rank(sharded.mesh, "model.load_state_dict()")
    with loading(sharded, model):
        return load(sharded, model, state_dict, strict)


def _load_whole(_: ShardedModel, model: nn.Module, state: Mapping[str, object], strict: bool) -> object:
    return type(model).load_state_dict(model, state, strict)


def _load_stages(sharded: ShardedModel, model: nn.Module, state: Mapping[str, object], strict: bool) -> object:
    """Load what this rank's stages hold of the state of a whole model. Missing and unexpected names are the whole model's."""
    path = next(path for path, module in sharded.model.named_modules() if module is model)
    twin = sharded.whole.get_submodule(path)
    names = twin.state_dict(keep_vars=True)
    result = nn.Module.load_state_dict(twin, {name: names.get(name, value) for name, value in state.items()}, strict)
    own = model.state_dict(keep_vars=True)
    type(model).load_state_dict(model, {name: value for name, value in state.items() if name in own}, strict=False)
    return result


def loaded_dtype(sharded: ShardedModel) -> torch.dtype | None:
    """The dtype in which most elements of the model were loaded."""
    numel: dict[torch.dtype, int] = {}
    for group in sharded.groups:
        for slot, dtype in zip(group.layout.slots, group.loaded_dtypes, strict=True):
            if dtype.is_floating_point:
                numel[dtype] = numel.get(dtype, 0) + slot.numel
    return max(numel, key=lambda dtype: numel[dtype]) if numel else None


def write_dtype(folder: Path, dtype: torch.dtype | None) -> None:
    """Write the dtype of the weights into config.json: `save_pretrained` writes the compute dtype there."""
    path = folder / "config.json"
    if dtype is None or not path.exists():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("dtype") not in (None, str(dtype).removeprefix("torch.")):
        config["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
