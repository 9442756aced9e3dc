"""Lets the chosen linear layers of a model multiply in eight bits, in place: modules and parameters stay the same objects.

A layer becomes one of torchao's `Float8Linear` or `MXFP8Linear`: its class changes, and what the recipe decides is set on it.
The undo log of `sharding` puts both back. Weights, gradients, optimizer states and checkpoints are those of a run without it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem
from hf_dist.float8.blocks import BlockRecipe, become_mxfp8
from hf_dist.float8.choice import Choice, choose, named
from hf_dist.float8.linear import become_float8
from hf_dist.float8.recipe import (
    SECTION,
    kernels_of,
    product_of_stacks,
    recipe_of,
    refuse_hardware,
    refuse_precision,
)
from hf_dist.float8.stacks import become_float8_stack

__all__ = ["choose_layers", "convert", "planned_layers"]


def choose_layers(
    model: nn.Module, config: DistConfig, device: torch.device, experts: Collection[int] = ()
) -> Choice | None:
    """Which layers of the whole `model` will multiply in float8; None if the section is off. Local.

    `experts`: numbers of experts of its mixtures. Raises `ConfigError` without torchao, on a device that cannot, for an
    unknown name in `skip`, or if no layer is left.
    """
    if config.hf_dist.fp8.enabled:
        refuse_hardware(config, device)
        refuse_precision(config)
        recipe_of(config)
    return planned_layers(model, config, experts, device)


def planned_layers(
    model: nn.Module, config: DistConfig, experts: Collection[int] = (), device: torch.device | None = None
) -> Choice | None:
    """The same for a plan, without torchao. `model` may be on meta; `device`: None for a GPU that has all kernels."""
    section = config.hf_dist.fp8
    if not section.enabled:
        return None
    choice = choose(model, experts=experts, skip=section.skip, kernels=kernels_of(config, device))
    for name in section.skip:
        if not any(named(path, name) for path, _ in model.named_modules()):
            raise ConfigError(
                Problem(f"{SECTION}.skip", name, "names no module of the model", "Remove it, or correct it.")
            )
    if not (choice.chosen or choice.stacks):
        kept = ", ".join(f"{len(paths)} {reason}" for reason, paths in choice.left.items()) or "it has none"
        what = f"but no linear layer of the model can multiply in {choice.kernels.name}: {kept}"
        raise ConfigError(Problem(f"{SECTION}.enabled", "true", what, "Remove the section."))
    return choice


def convert(choice: Choice, config: DistConfig) -> Choice:
    """Convert the chosen layers, of which this rank may have slices by now; returns what was done. Local."""
    recipe = recipe_of(config)
    choice = choice.of_slices()
    for layer in choice.chosen.values():
        if isinstance(recipe, BlockRecipe):
            become_mxfp8(layer, recipe)
        else:
            become_float8(layer, recipe)
    product = product_of_stacks(config)
    for experts in choice.stacks.values():
        become_float8_stack(experts, product)
    return choice
