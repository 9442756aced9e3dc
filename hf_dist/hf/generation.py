"""`generate` of a model whose weights rest sharded: gathered once per call where that fits, else unit by unit and token."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from hf_dist import collectives
from hf_dist.engine import Engine
from hf_dist.log import say_once
from hf_dist.machine import free_nbytes
from hf_dist.sharding.full_params import unsharded
from hf_dist.sharding.guard import replace_method
from hf_dist.sizes import size_text

__all__ = ["let_generate_gather"]

_SHARE = 0.5
"""Of the free memory for the weights; the rest is for the cache of keys and values, and for activations."""


def let_generate_gather(engine: Engine, module: nn.Module) -> None:
    """Have `module.generate(...)` gather the weights once; `module` is the prepared model or contains all its units. Local.

    Collective then: every rank calls `generate`, with any number of prompts and any lengths. Inside the caller's own
    `with hf_dist.gathered(model):` nothing is sent, and each rank may call it as often as it likes.
    """
    if hasattr(type(module), "generate"):
        replace_method(module, "generate", functools.partial(_generate, weakref.ref(engine)))


def _generate(reference: weakref.ref[Engine], model: Any, *args: Any, **kwargs: Any) -> Any:
    generate = type(model).generate
    engine = reference()
    if engine is None:
        return generate(model, *args, **kwargs)
    # Tokens travel to experts in every forward: a rank that is done must go on for the others.
    spread = engine.mesh.axes.size("ep") > 1
    if all(group.pins and group.fresh for group in engine.sharded.groups):  # in a block that gathered everything
        return generate(model, *args, **{**kwargs, "synced_gpus": spread})
    needed = sum(g.layout.numel * g.full.element_size() for g in engine.sharded.groups if not g.resident)
    if not _fits(engine, needed):
        say_once(
            f"generate: the {size_text(needed)} of full weights do not fit beside what is in memory; every token "
            "gathers them unit by unit, which is slow. More ranks, shorter prompts, or offloaded optimizer state make room."
        )
        return generate(model, *args, **{**kwargs, "synced_gpus": True})
    with unsharded(engine.model, settle=lambda group, changed: None, slices=True):
        # No rank waits for another inside: one that is done need not go on for the others.
        return generate(model, *args, **{**kwargs, "synced_gpus": spread})


def _fits(engine: Engine, needed: int) -> bool:
    """Whether all ranks of `shard` have room for `needed` more bytes; equal on each of them. Collective over shard."""
    mine = needed <= _SHARE * (free_nbytes(engine.device) or 0)
    return all(collectives.all_gather_object(engine.mesh.shard, mine))
