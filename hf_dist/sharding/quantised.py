"""Quantised weights among the parameters: sharded as the bytes they are, or refused by name.

A frozen 4-bit base of bitsandbytes is packed into one parameter per layer, whose elements are moved and never cast; its
scales (`quant_state`) stay whole on every rank, about a sixteenth of the bytes, a fortieth with double quantisation.
Methods that pack into buffers (GPTQ, AWQ) have nothing to shard there: buffers stay whole. Source: bitsandbytes 0.50
`nn/modules.py`, transformers 5.23 `integrations/`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_dist.errors import ModelError

__all__ = ["is_packed", "prepare_quantised"]

_HALVES = (torch.float16, torch.bfloat16, torch.float32)
_REMEDY = (
    "Load the base without quantization_config, or with BitsAndBytesConfig(load_in_4bit=True) and train an adapter on it "
    "(QLoRA), or train without a dist_config."
)


def is_packed(param: nn.Parameter) -> bool:
    """Whether the elements are bytes of a 4-bit weight, whatever dtype they are stored as (`bnb_4bit_quant_storage`)."""
    return type(param).__name__ == "Params4bit"


def prepare_quantised(model: nn.Module) -> None:
    """Before sharding: packed weights stay as they are packed. Local.

    Raises `ModelError` for quantised weights whose shards would be wrong, naming the first.
    """
    for name, param in model.named_parameters():
        problem = _problem(param)
        if problem:
            raise ModelError(f"{name} {problem}. {_REMEDY}")
    for name, module in model.named_modules():
        # HQQ keeps its bytes in an attribute or a parameter, with scales in a dict that no rank could find in a shard.
        if hasattr(module, "W_q") and hasattr(module, "meta"):
            raise ModelError(f"{name} is quantised with HQQ, which hf_dist cannot shard. {_REMEDY}")
    _keep_packing(model)


def _problem(param: nn.Parameter) -> str:
    """What is wrong with one parameter; empty if nothing is."""
    if is_packed(param):
        if getattr(param, "quant_state", None) is None:
            return "is a 4-bit weight that is not quantised yet: move the model to its device before it is prepared"
        return "is a 4-bit weight that requires a gradient" if param.requires_grad else ""
    if type(param).__name__ == "Int8Params":
        return "is an 8-bit weight of bitsandbytes, whose layer keeps a whole copy beside the parameter"
    if is_traceable_wrapper_subclass(param):
        return f"is a {type(param).__name__} (a tensor made of several), which has no flat shard"
    if param.is_floating_point() and param.dtype not in (*_HALVES, torch.float64):
        return f"is a quantised weight in {param.dtype}, which no cast to the compute dtype leaves right"
    return ""


def _keep_packing(model: nn.Module) -> None:
    """On a CPU bitsandbytes gives them other elements in evaluation, in another order: lost with the next shard."""
    for module in model.modules():
        if any(is_packed(p) for p in module.parameters(recurse=False)):
            module.__dict__["support_avx512bf16_for_cpu"] = False
