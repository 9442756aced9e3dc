"""PEFT operations that touch sharded weights outside of a forward: merge and unmerge adapters, switch, load, add.

PEFT itself is not patched. Instances of the prepared model get replacement methods, as for `save_pretrained`. A model without
adapters imports and changes nothing. Source: peft 0.21, `tuners/tuners_utils.py`, `utils/other.py`, `peft_model.py`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.hf.state_dict import loading
from hf_dist.sharding.full_params import full_tensors, gathered, whole_tensors
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import refuse_method, replace_method
from hf_dist.sharding.prepared import OWNER

__all__ = [
    "adapted_modules",
    "converting",
    "inactive_adapters_trainable",
    "let_adapters_work",
    "refuse_packed",
    "refuse_prompt_learning",
]


def adapted_modules(model: nn.Module) -> list[Any]:
    """Layers with adapters, and modules of which PEFT trains a copy (`modules_to_save`)."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def refuse_prompt_learning(model: nn.Module) -> None:
    """Raise `ModelError` for PEFT methods that run the model to save: one rank alone would wait there for the others. Local."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            raise ModelError(
                f"adapter {name!r} is {kind}: PEFT runs the model to compute the virtual tokens that it saves, but "
                "hf_dist writes adapters from their shards. Use a method that changes layers (LoRA, DoRA, IA3, LoHa, "
                "...), or train this one without a dist_config: only a few vectors are trained."
            )


@contextmanager
def inactive_adapters_trainable(model: nn.Module) -> Iterator[None]:
    """During sharding, give inactive adapters room for gradients; afterwards freeze them again.

    PEFT freezes all adapters but the active one, and `set_adapter` may activate another at any step. No effect on a model that
    trains no adapter, or that has only one.
    """
    adapters: dict[str, list[nn.Parameter]] = {}
    for module in adapted_modules(model):
        for layer_name in module.adapter_layer_names:
            layers = attrgetter(layer_name)(module)
            for name, layer in layers.items() if isinstance(layers, (Mapping, nn.ModuleDict, nn.ParameterDict)) else ():
                if isinstance(layer, nn.Parameter):
                    adapters.setdefault(name, []).append(layer)
                elif isinstance(layer, nn.Module):
                    adapters.setdefault(name, []).extend(layer.parameters())
    waiting: list[nn.Parameter] = []
    if len(adapters) > 1 and any(p.requires_grad for params in adapters.values() for p in params):
        waiting = [p for params in adapters.values() for p in params if not p.requires_grad and p.is_floating_point()]
    for p in waiting:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in waiting:
            p.requires_grad_(False)


def let_adapters_work(engine: Engine) -> None:
    """Make a prepared model's adapter methods work on shards, or raise with the reason. Local.

    `merge_adapter`, `unmerge_adapter` and `merge_and_unload` gather one layer at a time; `load_adapter` writes the master
    weights. All of these become collective. Methods that would add or remove parameters raise `ModelError`.
    """
    model = engine.model
    adapted = adapted_modules(model)
    if not adapted:
        return
    for layer in adapted:
        for method in ("merge", "unmerge"):
            if hasattr(type(layer), method):
                replace_method(layer, method, functools.partial(_on_full_weights, method))
    me = weakref.ref(engine)
    for module in model.modules():
        for method in ("inject_adapter", "delete_adapter"):
            if hasattr(type(module), method) and module not in adapted:
                refuse_method(module, method, functools.partial(_refuse, method))
        if hasattr(type(module), "_unload_and_optionally_merge"):
            replace_method(module, "_unload_and_optionally_merge", _with_embeddings)
        if hasattr(type(module), "load_adapter"):
            refuse_method(module, "load_adapter", functools.partial(_load_adapter, me))
    if getattr(model, "_hf_peft_config_loaded", False):
        refuse_method(model, "add_adapter", functools.partial(_refuse, "add_adapter"))


@contextmanager
def converting(model: Any, first: str | None) -> Iterator[None]:
    """Inside, `save_pretrained` may convert PiSSA, OLoRA and CorDA to LoRA: the adapter as it was initialised, in the folder
    `first`, is read from its files. PEFT loads it into the model, whose parameters are spread. Local; None: nothing changes.
    """
    if first is None:
        yield
        return
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    folder = os.path.abspath(first)
    weights: dict[str, torch.Tensor] = {}

    def load(*_: object, adapter_name: str, **__: object) -> None:
        model.peft_config[adapter_name] = PeftConfig.from_pretrained(folder)
        weights.update(load_peft_weights(folder, device="cpu"))

    def subtract(trained: Mapping[str, torch.Tensor], *_: object) -> dict[str, torch.Tensor]:
        # A B - A0 B0 = [A | A0] [B | -B0]^T, as LoraModel.subtract_mutated_init
        signs = {"lora_A": (1, 0), "lora_B": (-1, 1)}
        rows = [(name, value, signs[kind]) for name, value in trained.items() for kind in signs if kind in name]
        return {name: torch.cat([value, sign * weights[name].to(value)], dim) for name, value, (sign, dim) in rows}

    def forget(adapter_name: str) -> None:
        model.peft_config.pop(adapter_name, None)

    instead = (
        (model, "load_adapter", load),
        (model, "delete_adapter", forget),
        (model.base_model, "subtract_mutated_init", subtract),
    )
    before = [vars(owner).get(name) for owner, name, _ in instead]
    try:
        for owner, name, function in instead:
            vars(owner)[name] = function
        yield
    finally:
        for (owner, name, _), own in zip(instead, before, strict=True):
            vars(owner).pop(name) if own is None else vars(owner).update({name: own})


def _on_full_weights(method: str, layer: Any, *args: object, **kwargs: object) -> None:
    """PEFT's own merge of one layer on its full weights, adapters in fp32. Every rank keeps its part of the sum. Collective."""
    _refuse_elsewhere(method, [layer])
    refuse_packed(layer)
    with gathered(layer.parameters(), modifier_rank=0), _masters_in_place(layer):
        getattr(type(layer), method)(layer, *args, **kwargs)


def _refuse_elsewhere(method: str, layers: Iterable[nn.Module]) -> None:
    """Raise `ModelError` for adapted layers of which another pipeline stage has the weights. Local."""
    if any(next(layer.parameters(), None) is None for layer in layers):
        raise ModelError(
            f"{method} of adapters: other pipeline stages hold some of the layers. Call hf_dist.unprepare(model) first, on "
            "every rank: each then has all weights, and PEFT merges them. Or save the adapter, and `hf-dist export "
            "--merge-lora`."
        )


def refuse_packed(layer: Any) -> None:
    """Raise `ModelError` for a layer whose base stores four bits per weight, which cannot hold the sum. Local."""
    packed = next((p for p in layer.get_base_layer().parameters() if type(p).__name__ == "Params4bit"), None)
    if packed is not None:
        raise ModelError(
            f"{getattr(packed, OWNER)[1]}: an adapter cannot be merged into a sharded 4-bit base, because the sum would "
            "have to be quantised again. Save the adapter, and merge it into the base in full precision: "
            "`hf-dist export --merge-lora`, or PeftModel.from_pretrained(base, adapter).merge_and_unload()."
        )


def _with_embeddings(tuner: Any, *args: object, **kwargs: object) -> object:
    """PEFT's own method, which at its end compares addresses to see whether the embeddings are still tied. Collective."""
    _refuse_elsewhere("merge_and_unload", (m for m in tuner.model.modules() if hasattr(m, "base_layer")))
    tables = [find() for find in (tuner.model.get_input_embeddings, tuner.model.get_output_embeddings)]
    weights = [p for table in tables if isinstance(table, nn.Module) for p in table.parameters()]
    with gathered(weights, modifier_rank=0):
        return type(tuner)._unload_and_optionally_merge(tuner, *args, **kwargs)


@contextmanager
def _masters_in_place(layer: nn.Module) -> Iterator[None]:
    """Inside, trained parameters of a gathered layer hold their fp32 masters: the sum is rounded once, as in one process."""
    groups: dict[int, FlatGroup] = {id(g): g for g in (getattr(p, OWNER)[0]() for p in layer.parameters())}
    own = {id(p) for p in layer.parameters()}
    usual: list[tuple[nn.Parameter, torch.Tensor]] = []
    for group in groups.values():
        if not group.trainable or group.dtype == torch.float32:
            continue
        masters = full_tensors(group) if group.share is None else whole_tensors(group)  # as `gathered` shows them
        for param, (_, value) in zip(group.params, masters, strict=True):
            if id(param) in own:
                usual.append((param, param.data))
                param.data = value
    try:
        yield
    finally:
        for param, value in usual:
            param.data = value


def _load_adapter(engine: weakref.ref[Engine], model: Any, *args: object, **kwargs: object) -> object:
    """PEFT's own method, into an adapter that the prepared model already has. Collective."""
    owner = engine()
    name = args[1] if len(args) > 1 else kwargs.get("adapter_name", "default")
    if owner is None or name not in getattr(model, "peft_config", {}):
        return _refuse("load_adapter", model, name)
    with loading(owner.sharded):
        return type(model).load_adapter(model, *args, **kwargs)


def _refuse(method: str, model: object, *args: object, **kwargs: object) -> object:
    names = list(getattr(model, "peft_config", {}))
    raise ModelError(
        f"{type(model).__name__}.{method}: the model is sharded by hf_dist, and its adapters {names} are spread over the ranks "
        "and known to the optimizer, so none can be added or removed. Add every adapter before the model is prepared (before "
        "the Trainer is created): `set_adapter` switches between them at any step. After training: delete the engine, or call "
        "hf_dist.unprepare(model) on every rank, first; the next Trainer prepares it again."
    )
