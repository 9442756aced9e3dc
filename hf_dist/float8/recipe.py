"""torchao's recipes for products in eight bits: which is meant, whether this machine can compute it, what is missing.

    tensorwise           one scale per tensor; the fastest
    rowwise              one scale per row of each factor; nearer to bf16
    rowwise_with_gw_hp   the same, and gradients of weights are computed in bf16; the nearest

All scales are powers of two, also those of "tensorwise", for which torchao's default is another: then the numbers do not depend
on the layout.

Source: torchao `float8/config.py` (Float8LinearRecipeName).
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem

__all__ = ["SECTION", "recipe_of", "refuse_hardware", "refuse_precision"]

SECTION = "hf_dist.fp8"
NEEDED = (8, 9)
"""Compute capability of CUDA devices that multiply float8: Ada and Hopper."""
EXTRA = 'Install it: pip install "hf_dist[fp8]".'


def recipe_of(config: DistConfig) -> Any:
    """torchao's `Float8LinearConfig` of the section. Local. Raises `ConfigError` if torchao is not installed."""
    section = config.hf_dist.fp8
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        found = f"torchao cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", found, EXTRA)) from error
    recipe = float8.Float8LinearConfig.from_recipe_name(section.recipe)
    # Powers of two change no digit: parts of a tensor, each with a scale of its own, come out as the whole does.
    return dataclasses.replace(recipe, emulate=section.emulate, round_scales_to_power_of_2=True)


def refuse_hardware(config: DistConfig, device: torch.device) -> None:
    """Raise `ConfigError` unless `device` multiplies float8, or the section asks for emulation. Local; asks once."""
    if config.hf_dist.fp8.emulate:
        return
    emulated = f'Set "{SECTION}.emulate": true, which is slow and gives the same numbers, or remove the section.'
    if device.type != "cuda":
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", f"a {device.type} has no products in float8", emulated))
    found = torch.cuda.get_device_capability(device)
    if torch.version.cuda is not None and found < NEEDED:
        name = torch.cuda.get_device_name(device)
        what = (
            f"{name} has compute capability {found[0]}.{found[1]}, and products in float8 need {NEEDED[0]}.{NEEDED[1]}"
        )
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", what, emulated))


def refuse_precision(config: DistConfig) -> None:
    """Raise `ConfigError` for products that would come out in fp32, which the kernels do not offer; emulated ones do. Local."""
    section = config.hf_dist.fp8
    if not (section.emulate or config.bf16.enabled is True or config.torch_autocast.enabled):
        fix = 'Set "bf16": {"enabled": true}.'
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", "needs bf16, in which products come out", fix))
