"""The weights that TRL sends to vLLM (server or same process), read from the shards unit by unit.

TRL gathers only for DeepSpeed and FSDP. With an adapter it gathers the whole model, merges in place and unmerges again.
Here one unit at a time is whole, is merged in a copy and restored bit for bit. Source: trl 1.16,
`generation/vllm_generation.py` `_iter_named_params`, which defines the names.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.hf.peft import adapted_modules, refuse_packed
from hf_dist.sharding.full_params import unsharded
from hf_dist.sharding.prepared import OWNER

__all__ = ["let_vllm_gather", "named_weights", "whole_by_unit"]


def let_vllm_gather() -> None:
    """Make TRL read the weights of prepared models from the shards, with `_READERS`. Local.

    Skips modules of TRL that are not imported yet: its trainers import them before they prepare a model.
    """
    for path, instead in _READERS.items():
        place, _, name = path.rpartition(".")
        owner: object = sys.modules.get(place)
        if owner is None:
            module, _, cls = place.rpartition(".")
            owner = getattr(sys.modules.get(module), cls, None)
        stock = getattr(owner, name, None)
        if stock is not None and stock.__module__ != __name__:
            setattr(owner, name, instead(stock))


def _engine_of(holder: Any) -> Engine | None:
    find = getattr(holder.accelerator, "engine_of", None)
    found: Engine | None = find(holder.model) if find is not None else None
    return found


def _named(stock: Callable[[object], Any]) -> Callable[[object], object]:
    def _iter_named_params(generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As TRL's; collective for models on shards."""
        engine = _engine_of(generation)
        return stock(generation) if engine is None else named_weights(engine, generation._fix_param_name_to_vllm)

    return _iter_named_params


def _moved(stock: Callable[[object], Any]) -> Callable[[object], object]:
    def _move_model_to_vllm_inner(trainer: Any) -> None:
        """As TRL's; collective for models on shards."""
        engine = _engine_of(trainer)
        if engine is None:
            return stock(trainer)
        for name, tensor in named_weights(engine, trainer._fix_param_name_to_vllm):
            if trainer.vllm_mode == "colocate":
                worker = trainer.llm.llm_engine.model_executor.driver_worker
                worker.model_runner.model.load_weights([(name, tensor)])
            elif trainer.accelerator.is_main_process:
                trainer.vllm_client.update_named_param(name, tensor)

    return _move_model_to_vllm_inner


def _streamed(stock: Callable[[object], Any]) -> Callable[[object], object]:
    def _streaming_iter(trainer: object) -> Iterator[tuple[str, torch.Tensor]]:
        """As TRL's; collective for models on shards."""
        return whole_by_unit(stock(trainer))

    return _streaming_iter


def _saved(stock: Callable[..., None]) -> Callable[..., None]:
    def save_lora_adapter(model: Any, accelerator: object, adapter_name: str, dest_dir: str) -> None:
        """As TRL's, which every rank calls."""
        own = [p for name, p in model.named_parameters() if f".{adapter_name}." in name and hasattr(p, OWNER)]
        with unsharded(own, after=lambda group, changed: None):
            stock(model, accelerator, adapter_name, dest_dir)

    return save_lora_adapter


_GRPO = "trl.experimental.async_grpo.async_grpo_trainer"
_DISTILLATION = "trl.experimental.async_distillation.async_distillation_trainer"
_READERS: dict[str, Callable[[Any], object]] = {
    "trl.generation.vllm_generation.VLLMGeneration._iter_named_params": _named,
    "trl.experimental.online_dpo.online_dpo_trainer.OnlineDPOTrainer._move_model_to_vllm_inner": _moved,
    f"{_GRPO}.AsyncGRPOTrainer._streaming_iter": _streamed,
    f"{_DISTILLATION}.AsyncDistillationTrainer._streaming_iter": _streamed,
    f"{_GRPO}.save_lora_adapter": _saved,
    f"{_DISTILLATION}.save_lora_adapter": _saved,
}
"""TRL's functions that read weights for a server, each with the function that wraps it."""


def named_weights(engine: Engine, rename: Callable[..., str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name for vLLM, tensor) of every weight, adapters merged, in the order of the model's parameters. Collective.

    Every rank iterates to the end. One unit of the model is whole at a time. The tensors are copies, because vLLM packs several
    before it sends. `rename`: TRL's. Raises `ModelError` if experts are spread over ranks or the base is packed in 4 bits.
    """
    if engine.mesh.axes.size("ep") > 1:
        raise ModelError(
            "weights for vLLM: the experts are spread over ranks (expert_parallel), each rank would send only its own. "
            "Set expert_parallel.enabled to false; ZeRO-3 shards experts, too."
        )
    layers = _mergeable(engine.model)
    weights = [(rename(name), param) for name, param in _sent(engine.model)]
    for _, run in itertools.groupby(weights, key=lambda pair: id(getattr(pair[1], OWNER)[0]())):
        pairs = list(run)
        own = list({id(layers[id(p)]): layers[id(p)] for _, p in pairs if id(p) in layers}.values())
        needed = [p for _, p in pairs] + [p for layer in own for p in layer.parameters()]
        with unsharded(needed, after=lambda group, changed: None), _merged(own):
            for name, param in pairs:
                yield name, param.data.clone()


def whole_by_unit(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same (name, tensor) pairs, sharded ones as whole copies, one unit of the model at a time. Collective."""

    def owner(pair: tuple[str, torch.Tensor]) -> int:
        return id(getattr(pair[1], OWNER)[0]()) if hasattr(pair[1], OWNER) else 0

    for held, run in itertools.groupby(weights, key=owner):
        pairs: list[tuple[str, Any]] = list(run)
        with unsharded([p for _, p in pairs], after=lambda group, changed: None) if held else nullcontext():
            for name, tensor in pairs:
                yield name, tensor.clone() if held else tensor


def _sent(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that vLLM has, by their names in the model without adapters."""
    prefix = getattr(model, "prefix", None) if hasattr(model, "peft_config") else None
    for name, param in model.named_parameters():
        if prefix is None:
            yield name, param
        elif prefix not in name and "original_module" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            yield plain.replace("modules_to_save.default.", ""), param


def _mergeable(model: nn.Module) -> dict[int, Any]:
    """Layers with an adapter, by the id of each weight that a merge changes."""
    found: dict[int, object] = {}
    for layer in adapted_modules(model):
        if hasattr(layer, "get_base_layer") and hasattr(type(layer), "merge"):
            refuse_packed(layer)
            found |= {id(p): layer for p in layer.get_base_layer().parameters()}
    return found


@contextmanager
def _merged(layers: list[Any]) -> Iterator[None]:
    """Inside, whole layers hold the sum of base and adapters, as PEFT computes it; afterwards exactly their old values."""
    merged = [layer for layer in layers if not layer.merged]
    kept = [(p, p.data, p.data.clone()) for layer in merged for p in layer.get_base_layer().parameters()]
    done: list[Any] = []
    try:
        for layer in merged:
            type(layer).merge(layer)
            done.append(layer)
        yield
    finally:
        for layer in done:
            type(layer).unmerge(layer)
        for param, tensor, value in kept:
            tensor.copy_(value)
            param.data = tensor
