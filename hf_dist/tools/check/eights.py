"""Products in float8 in one process: the same layers, converted by the same code, emulated as on every CPU, beside fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dist.config import load_config
from hf_dist.float8.convert import choose_layers, convert
from hf_dist.float8.recipe import refuse_precision
from hf_dist.parallel.experts.spread import expert_counts
from hf_dist.tools.check.encoded import in_fp32

__all__ = ["eights_of", "multiply_in_float8"]

_CPU = torch.device("cpu")


def eights_of(layout: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """(the layout to compare, what is to be said of it); nothing is said without the section. `layout`: without "auto".

    Raises `ConfigError` for a section that the job itself would refuse on a GPU.
    """
    config = load_config(dict(layout))
    if not config.hf_dist.fp8.enabled:
        return dict(layout), []
    refuse_precision(config)
    layout, said = in_fp32(layout, "the last bit of a number decides to which of float8's it is rounded")
    own = layout["hf_dist"]
    emulated = {**layout, "hf_dist": {**own, "fp8": {**own["fp8"], "emulate": True}}}
    choice = choose_layers(model, load_config(emulated), _CPU, expert_counts(model))
    assert choice is not None
    what = (
        f"one process multiplies in float8, too; the products are emulated, as on every CPU: {'; '.join(choice.rows())}"
    )
    return emulated, [what, *said]


def multiply_in_float8(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Convert a whole model's layers as the engine does. In place; local. `config`: with the section of `eights_of`."""
    read = load_config(dict(config))
    choice = choose_layers(model, read, _CPU, expert_counts(model))
    if choice is not None:
        convert(choice, read)
