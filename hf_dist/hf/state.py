"""A sharded model as a plain state dict, one unit at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.engine import Engine
from hf_dist.sharding.gather import full_tensors, gathered, load_full_tensor
from hf_dist.sharding.runtime import ShardedModel


def full_state_dict(engine: Engine, keep: bool = True) -> dict[str, torch.Tensor]:
    """All weights and persistent buffers on the CPU, under the model's own names, in the dtype they were loaded in.

    Collective: every rank calls it; those with `keep=False` get an empty dict and hold one unit at most. Tied names share
    one tensor, as in `model.state_dict()`.
    """
    names: dict[int, list[str]] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        state[name] = value  # fixes the order of keys
        names.setdefault(id(value), []).append(name)
    owned: set[str] = set()
    for group in engine.sharded.groups:
        for index, (_, tensor) in enumerate(full_tensors(group)):
            aliases = names.get(id(group.params[index]), [])
            owned.update(aliases)
            if keep:
                host = tensor.detach().to("cpu", copy=True)
                state.update(dict.fromkeys(aliases, host))
    if not keep:
        return {}
    for name, value in state.items():
        if name not in owned and isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu()
    return state


@contextmanager
def loading(engine: Engine) -> Iterator[None]:
    """Inside, `load_state_dict` of the model (or of PEFT) reaches the master weights with all bits of the file.

    Collective: every rank enters, loads the same values, and leaves.
    """
    own = {id(p): (group, i) for group in engine.sharded.groups for i, p in enumerate(group.params)}

    def keep(module: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
        # Before the model copies them into weights of the compute dtype.
        for name, param in module.named_parameters(remove_duplicate=False):
            if name in state and id(param) in own:
                group, index = own[id(param)]
                load_full_tensor(group, group.layout.slots[index], state[name])

    handle = engine.model.register_load_state_dict_pre_hook(keep)
    try:
        with gathered(engine.model):
            yield
    finally:
        handle.remove()
    engine.sharded.weights_changed()


def loaded_dtype(sharded: ShardedModel) -> torch.dtype | None:
    """The dtype most elements of the model were loaded in."""
    numel: dict[torch.dtype, int] = {}
    for group in sharded.groups:
        for slot, dtype in zip(group.layout.slots, group.loaded_dtypes, strict=True):
            if dtype.is_floating_point:
                numel[dtype] = numel.get(dtype, 0) + slot.numel
    return max(numel, key=lambda dtype: numel[dtype]) if numel else None


def write_dtype(folder: Path, dtype: torch.dtype | None) -> None:
    """Make config.json name the dtype of the weights beside it: `save_pretrained` writes the compute dtype there."""
    path = folder / "config.json"
    if dtype is None or not path.exists():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("dtype") not in (None, str(dtype).removeprefix("torch.")):
        config["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
