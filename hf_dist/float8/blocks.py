"""Linear layers that multiply in MXFP8, by torchao: a scale, which is a power of two, for each block of 32 numbers.

A layer becomes one of torchao's `MXFP8Linear`. Gradients of weights have blocks along the rows of the input, so rows of zeros
fill the last block; they change no number. Source: torchao 0.18, `prototype/moe_training/mxfp8_linear.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["BLOCK", "BlockRecipe", "become_mxfp8", "block_recipe", "is_mxfp8", "kernel_is_missing", "stock_class"]

BLOCK = 32
"""Numbers with one scale."""
_FUNCTION = "_to_mxfp8_then_scaled_mm"
_KERNEL = "torchao::mxfp8_quantize"
_MARK = "_mxfp8_of"
"""Attribute of classes of converted layers."""


@dataclass(frozen=True)
class BlockRecipe:
    """What torchao calls the product with."""

    kind: Any
    """torchao's `MXFP8Linear`."""
    options: Mapping[str, Any]
    """Arguments of its constructor, which it keeps as attributes."""


def block_recipe(emulate: bool) -> BlockRecipe:
    """torchao's recipe for training. Local. Raises `ImportError` or `AttributeError` where torchao has none."""
    linear: Any = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
    preference = linear.KernelPreference.EMULATED if emulate else linear.KernelPreference.AUTO
    rounding = linear.ScaleCalculationMode.RCEIL  # the largest number of a block stays in range
    options = {"kernel_preference": preference, "scale_calculation_mode": rounding, "wgrad_with_hp": False}
    assert callable(getattr(linear, _FUNCTION))
    return BlockRecipe(linear.MXFP8Linear, options)


def kernel_is_missing() -> bool:
    """Whether torchao's kernel that casts along columns was not loaded, so that backward would fail. Local; asks no GPU."""
    try:
        return not torch._C._dispatch_has_kernel_for_dispatch_key(_KERNEL, "CUDA")
    except RuntimeError:  # it is not even declared
        return True


def stock_class(kind: Any) -> Any:
    """The class that a layer of the converted class `kind` had; None for another class."""
    return vars(kind).get(_MARK)


def is_mxfp8(module: nn.Module) -> bool:
    """Whether `module` was converted."""
    return _MARK in vars(type(module))


def become_mxfp8(layer: Any, recipe: BlockRecipe) -> None:
    """Convert one layer in place. Local."""
    cls: Any = type(layer)
    layer.__class__ = _class_of(recipe.kind, cls)
    vars(layer).update(recipe.options)


@functools.cache
def _class_of(kind: Any, cls: Any) -> type[nn.Module]:
    product: Any = getattr(importlib.import_module(kind.__module__), _FUNCTION)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = rows.shape[0]
        if count % BLOCK:
            rows = nn.functional.pad(rows, (0, 0, 0, -count % BLOCK))
        out: torch.Tensor = product(
            rows, weight, self.kernel_preference, self.scale_calculation_mode, self.wgrad_with_hp
        )
        out = out[:count].reshape(*x.shape[:-1], out.shape[-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)

    # A subclass with the stock forward keeps its other methods.
    bases = (kind,) if cls is nn.Linear else (kind, cls)
    return type(kind.__name__, bases, {"forward": forward, "__module__": __name__, _MARK: cls})
