"""Quantised weights among the parameters: sharded as packed bytes, or refused by name.

bitsandbytes packs a frozen 4-bit base into one parameter per layer, whose elements are moved and never cast. Its scales
(`quant_state`) stay whole on every rank: about a sixteenth of the bytes, a fortieth with double quantisation.
Methods that pack into buffers (GPTQ, AWQ) are not sharded, because buffers stay whole. Source: bitsandbytes 0.50
`nn/modules.py`, transformers 5.23 `integrations/`.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.wrapped import refuse_wrapped

__all__ = ["is_packed", "prepare_quantised"]

_HALVES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN_BASE = (
    "Load the base without quantization_config, or with BitsAndBytesConfig(load_in_4bit=True) and train an adapter on it "
    "(QLoRA), or train without a dist_config."
)


def is_packed(param: nn.Parameter) -> bool:
    """Whether `param` holds the bytes of a 4-bit weight, whatever its storage dtype (`bnb_4bit_quant_storage`)."""
    return type(param).__name__ == "Params4bit"


def prepare_quantised(model: nn.Module) -> None:
    """Before sharding, make modules keep the packing of their weights. Local.

    Raises `ModelError`, naming the parameter, for the first quantised weight whose shards would be wrong.
    """
    refuse_wrapped(model)
    for name, param in model.named_parameters():
        problem = _problem(param)
        if problem:
            raise ModelError(f"{name} {problem}")
    for name, module in model.named_modules():
        # HQQ keeps its bytes in an attribute or a parameter, and its scales in a dict outside of any shard.
        if hasattr(module, "W_q") and hasattr(module, "meta"):
            raise ModelError(f"{name} is quantised with HQQ, which hf_dist cannot shard. {_PLAIN_BASE}")
    _keep_packing(model)


def _problem(param: nn.Parameter) -> str:
    """Why one quantised parameter cannot be sharded, and what to do; empty if it can."""
    if is_packed(param):
        if getattr(param, "quant_state", None) is None:
            return "is a 4-bit weight that is not quantised yet. Move the model to its device before it is prepared."
        if param.requires_grad:
            return (
                "is a 4-bit weight that requires a gradient. Freeze it (requires_grad_(False)), and train an adapter."
            )
        return ""
    if type(param).__name__ == "Int8Params":
        return f"is an 8-bit weight of bitsandbytes, whose layer keeps a whole copy beside the parameter. {_PLAIN_BASE}"
    if param.is_floating_point() and param.dtype not in (*_HALVES, torch.float64):
        why = f"is a quantised weight in {param.dtype}, which a cast to the compute dtype would corrupt"
        return f"{why}. {_PLAIN_BASE} A checkpoint in FP8 is read with FineGrainedFP8Config(dequantize=True)."
    return ""


def _keep_packing(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for evaluation on a CPU: the next reshard would lose the new order."""
    for module in model.modules():
        if any(is_packed(p) for p in module.parameters(recurse=False)):
            module.__dict__["support_avx512bf16_for_cpu"] = False
