"""Tables that a half-precision Hugging Face model has in half precision, such as sinusoidal positions (NLLB, XGLM).

`from_pretrained(dtype=bfloat16)` builds a model under that default dtype, so its tables come out in it, but for those that
the class asks for in fp32 (rotary frequencies). An fp32 model that computes in bf16 here would add an fp32 table to bf16
tokens, and end in a LayerNorm of mixed dtypes. The table is cast inside its module's forward only: the model keeps it as it was
loaded, and what a forward writes into it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_dist.sharding.precision import Precision

__all__ = ["cast_in_forwards"]

_CAST = "_hf_dist_half_buffers"
_FREQUENCIES = "inv_freq"
"""Ends the names of the commonest tables, which every class asks for in fp32."""


def cast_in_forwards(model: nn.Module, precision: Precision) -> list[str]:
    """Hook the modules of such tables; their full names. Local, before any forward."""
    compute = precision.compute
    if compute == torch.float32:
        return []
    found = []
    for path, part in _hugging_face_models(model):
        full = {name: f"{path}.{name}" if path else name for name in _tables(part)}
        names = [name for name in full if not _is_saved(part, name) or full[name] not in precision.keep_fp32]
        if any(not name.endswith(_FREQUENCIES) for name in names):
            half = _half(part, compute)
            found += [(full[name], part, name) for name in names if name in half]
    for _, part, name in found:
        owner, _, buffer = name.rpartition(".")
        module = part.get_submodule(owner)
        module.register_forward_pre_hook(_Cast(buffer, compute))
        module.register_forward_hook(_Restore(buffer), always_call=True)
    return [full for full, _, _ in found]


def _hugging_face_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the outermost ones."""
    if hasattr(type(model), "_from_config") and getattr(model, "config", None) is not None:
        yield "", model
        return
    for name, child in model.named_children():
        for path, part in _hugging_face_models(child):
            yield f"{name}.{path}" if path else name, part


def _tables(model: nn.Module) -> list[str]:
    """Names of the buffers in fp32."""
    return [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]


def _is_saved(model: nn.Module, name: str) -> bool:
    """Whether checkpoints have this buffer; authors' lists of fp32 weights are for what they have."""
    owner, _, buffer = name.rpartition(".")
    return buffer not in model.get_submodule(owner)._non_persistent_buffers_set


def _half(model: nn.Module, compute: torch.dtype) -> set[str]:
    """The tables that a new model of the class has in `compute`; none if it cannot be built again from its config."""
    made: Any = type(model)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # a class's own code may draw
            other = made._from_config(copy.deepcopy(model.config), dtype=compute)  # which sets that of its parts, too
        return {name for name, buffer in other.named_buffers() if buffer.dtype == compute}
    except Exception:  # whatever a model's own code raises
        return set()


class _Cast:
    """Puts the half-precision copy in place."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def __call__(self, module: nn.Module, args: object) -> None:
        table = module._buffers[self.name]
        if table is not None and table.dtype == torch.float32:
            half: torch.Tensor = table.to(self.dtype)
            kept: dict[str, object] = module.__dict__.setdefault(_CAST, {})
            kept[self.name] = table, half, half._version
            module._buffers[self.name] = half


class _Restore:
    """Puts the table back, with what the forward wrote into its copy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        kept: dict[str, Any] = module.__dict__.get(_CAST, {})
        if self.name not in kept:
            return
        table, half, version = kept.pop(self.name)
        assert isinstance(half, torch.Tensor)
        if module._buffers[self.name] is not half:
            return  # because the forward has made a longer one
        if half._version != version:  # what the forward wrote
            table.copy_(half)
        module._buffers[self.name] = table
