"""torchao's recipes for products in eight bits: which is meant, whether this machine can compute it, what is missing.

    tensorwise           one scale per tensor; the fastest
    rowwise              one scale per row of each factor; nearer to bf16
    rowwise_with_gw_hp   the same, and gradients of weights are computed in bf16; the nearest
    mxfp8                one scale per 32 numbers along the product; of Blackwell

All scales are powers of two, also those of "tensorwise", for which torchao's default is another: then the numbers do not depend
on the layout.

Stacks of experts have grouped products with scales of rows, under "rowwise" and "tensorwise".

Source: torchao `float8/config.py` (Float8LinearRecipeName), `prototype/moe_training`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem
from hf_dist.float8.blocks import BLOCK, block_recipe, kernel_is_missing
from hf_dist.float8.choice import Kernels
from hf_dist.float8.stacks import GroupedProduct, torchao_product

__all__ = ["SECTION", "kernels_of", "product_of_stacks", "recipe_of", "refuse_hardware", "refuse_precision"]

SECTION = "hf_dist.fp8"
NEEDED = (8, 9)
"""Compute capability of CUDA devices that multiply float8: Ada and Hopper."""
NEEDED_BLOCKS = (10, 0)
"""For MXFP8: Blackwell."""
GROUPED = (9, 0)
"""The only one for grouped products in float8 (torch's `_scaled_grouped_mm`, torchao's own tests): Hopper."""
MX = "mxfp8"
EXTRA = 'Install it: pip install "hf_dist[fp8]".'


def recipe_of(config: DistConfig) -> Any:
    """torchao's `Float8LinearConfig` of the section, or a `BlockRecipe`. Local. Raises `ConfigError` if torchao has none."""
    section = config.hf_dist.fp8
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        found = f"but torchao cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", found, EXTRA)) from error
    if section.recipe == MX:
        return _block_recipe(section.emulate)
    return _powers_of_two(float8, section.recipe, section.emulate)


def _powers_of_two(float8: Any, recipe: str, emulate: bool) -> Any:
    # Powers of two change no digit: parts of a tensor, each with a scale of its own, come out as the whole does.
    found = float8.Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(found, emulate=emulate, round_scales_to_power_of_2=True)


def _block_recipe(emulate: bool) -> Any:
    other = 'Install torchao 0.18 or newer, built for this PyTorch and CUDA, or set "recipe": "rowwise".'
    try:
        found = block_recipe(emulate)
    except (ImportError, AttributeError) as error:
        what = f"but the installed torchao has no such products ({type(error).__name__}: {error})"
        raise ConfigError(Problem(f"{SECTION}.recipe", MX, what, other)) from error
    if not emulate and kernel_is_missing():
        what = "but the installed torchao did not load its kernel mxfp8_quantize, so backward would fail"
        raise ConfigError(Problem(f"{SECTION}.recipe", MX, what, other))
    return found


def product_of_stacks(config: DistConfig) -> GroupedProduct:
    """How stacks of experts multiply, where the kernels have them. Local."""
    float8: Any = importlib.import_module("torchao.float8")
    return GroupedProduct(_powers_of_two(float8, "rowwise", config.hf_dist.fp8.emulate))


def kernels_of(config: DistConfig, device: torch.device | None) -> Kernels:
    """What the kernels of the recipe take on `device`; None: on a GPU that has them, for plans. Local."""
    section = config.hf_dist.fp8
    if section.recipe == MX:
        return Kernels("MXFP8", BLOCK, transposed=False, no_stacks="for which mxfp8 is not available")
    return Kernels(no_stacks=_why_no_stacks(section.recipe, section.emulate, device))


def _why_no_stacks(recipe: str, emulate: bool, device: torch.device | None) -> str:
    if recipe not in ("rowwise", "tensorwise"):
        return f"for which torchao has no {recipe}"
    if emulate or device is None:
        return ""
    if torchao_product() is None:
        return "for which the installed torchao has no product"
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != GROUPED:
        return "whose products need compute capability 9.0"
    return ""


def refuse_hardware(config: DistConfig, device: torch.device) -> None:
    """Raise `ConfigError` unless `device` multiplies in the recipe, or the section asks for emulation. Local."""
    if config.hf_dist.fp8.emulate:
        return
    blocks = config.hf_dist.fp8.recipe == MX
    name, needed = ("MXFP8", NEEDED_BLOCKS) if blocks else ("float8", NEEDED)
    key, value = (f"{SECTION}.recipe", MX) if blocks else (f"{SECTION}.enabled", "true")
    less = 'set "recipe": "rowwise", which needs 8.9' if blocks else "remove the section"
    fix = f'Set "{SECTION}.emulate": true, which is slow and gives the same numbers, or {less}.'
    if device.type != "cuda":
        raise ConfigError(Problem(key, value, f"but a {device.type} has no products in {name}", fix))
    found = torch.cuda.get_device_capability(device)
    if torch.version.cuda is not None and found < needed:
        gpu = torch.cuda.get_device_name(device)
        what = f"but {gpu} has compute capability {found[0]}.{found[1]}, and products in {name} need {needed[0]}.{needed[1]}"
        raise ConfigError(Problem(key, value, what, fix))


def refuse_precision(config: DistConfig) -> None:
    """Raise `ConfigError` for products that would come out in fp32, which the kernels do not offer; emulated ones do. Local."""
    section = config.hf_dist.fp8
    if not (section.emulate or config.bf16.enabled is True or config.torch_autocast.enabled):
        fix = 'Set "bf16": {"enabled": true}.'
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", "needs bf16, in which products come out", fix))
