"""Maps the names of a model in memory to the tensors that `save_pretrained` would write, without reading values.

HF's own functions run on meta tensors: tied weights, ignored keys, reverse weight conversions (experts split, fused weights
split, renames), PEFT's adapter names. The result shows what they did to each element.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.provenance import Provenance, UntraceableError
from hf_dist.checkpoint.weight_plan import WEIGHTS, StoredTensor, WeightPlan
from hf_dist.errors import CheckpointError
from hf_dist.sharding.param_slice import held_slice
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["buffer_parts", "weight_plan_for"]

ADAPTER_WEIGHTS = "adapter_model.safetensors"
UNLIMITED = 2**62
"""PEFT writes an adapter as a single file."""

State = dict[str, torch.Tensor]


def weight_plan_for(
    model: nn.Module, loaded_dtypes: Mapping[str, torch.dtype], max_shard_size: int | str = "50GB"
) -> WeightPlan:
    """The files that `model.save_pretrained` would write, in the dtypes `loaded_dtypes` (other tensors keep theirs).

    `loaded_dtypes`: by full parameter name. `max_shard_size` as in `save_pretrained`: bytes, or "5GB". Reads no values and
    sends nothing; equal on every rank. Raises `CheckpointError` for a quantised model, for ties that HF refuses, and for a
    conversion that computes values.
    Source: transformers `PreTrainedModel.save_pretrained`, peft `PeftModel.save_pretrained`, `Trainer._save`.
    """
    state = _meta_state(model, loaded_dtypes)
    roots = {name: tensor for tensor, name in _canonical(model, state)}
    plans = []
    with Provenance(roots) as provenance:
        for below, weights_name, tensors in _written(model, state):
            unlimited = weights_name == ADAPTER_WEIGHTS and not isinstance(model, PreTrainedModel)
            plan = WeightPlan.pack(
                [_stored(name, tensor, provenance) for name, tensor in tensors.items()],
                weights_name=weights_name,
                max_shard_size=UNLIMITED if unlimited else max_shard_size,
                metadata=_index_metadata(model),
                storages={n: (t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for n, t in tensors.items()},
            )
            plans.append((below, plan))
    return WeightPlan.join(plans)


def buffer_parts(model: nn.Module, plan: WeightPlan) -> list[OwnedPart]:
    """The persistent buffers of `plan`, small and equal on every rank. Rank 0 writes them beside its shards."""
    params = {id(p) for p in model.parameters()}
    return [
        OwnedPart(name, TensorSlice.all(value.shape), 0, value.numel(), value.detach().reshape(-1))
        for name, value in model.state_dict(keep_vars=True).items()
        if name in plan.by_param and isinstance(value, torch.Tensor) and id(value) not in params
    ]


def _meta_state(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> State:
    """`model.state_dict()` on meta in full shapes: one tensor per parameter or buffer, shared by all its names."""
    names = {id(param): name for name, param in model.named_parameters()}
    seen: dict[int, torch.Tensor] = {}
    state: State = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):  # extra state, which the safetensors format cannot hold
            continue
        if id(value) not in seen:
            dtype = dtypes.get(names.get(id(value), name), value.dtype)
            seen[id(value)] = torch.empty(held_slice(value).whole, dtype=dtype, device="meta")
        state[name] = seen[id(value)]
    return state


def _canonical(model: nn.Module, state: State) -> Iterator[tuple[torch.Tensor, str]]:
    """Each meta tensor once, with its parameter's name in `named_parameters`."""
    params = {name for name, _ in model.named_parameters()}
    seen: set[int] = set()
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in params):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor, name


def _written(model: nn.Module, state: State) -> Iterator[tuple[str, str, State]]:
    """(subfolder, weights file name, tensors in HF's order) for every set of weights that `save_pretrained` writes."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        for adapter in model.peft_config:
            below = "" if adapter == "default" else f"{adapter}/"
            yield below, ADAPTER_WEIGHTS, peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    elif not isinstance(model, PreTrainedModel):
        yield "", WEIGHTS, _without_aliases(state)
    elif getattr(model, "_hf_peft_config_loaded", False):
        adapters: Any = model
        weights = adapters.get_adapter_state_dict(state_dict=state)
        yield "", ADAPTER_WEIGHTS, {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    else:
        yield "", WEIGHTS, _as_on_disk(model, state)


def _as_on_disk(model: PreTrainedModel, state: State) -> State:
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(
            f"{type(model).__name__} is quantised; its weights cannot be written from the shards. Train an adapter (PEFT) on "
            "it, which is saved without the base, or load it without quantization_config."
        )
    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    try:
        kept = remove_tied_weights_from_state_dict(kept, model)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error
    return revert_weight_conversion(model, kept)


def _without_aliases(state: State) -> State:
    """For a module that is not HF's: safetensors refuses two names for one tensor, so only the first name stays."""
    seen: set[int] = set()
    return {n: t for n, t in state.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]


def _stored(name: str, tensor: torch.Tensor, provenance: Provenance) -> StoredTensor:
    try:
        return StoredTensor(name, tuple(tensor.shape), tensor.dtype, provenance.pieces(tensor))
    except UntraceableError:
        raise CheckpointError(
            f"{name} is computed from the weights of this model when it is saved, not only moved or renamed, so the ranks "
            "cannot write it from their shards. Please report the model class."
        ) from None


def _index_metadata(model: nn.Module) -> dict[str, object]:
    return {"total_parameters": model.num_parameters()} if isinstance(model, PreTrainedModel) else {}
