"""`generate` of a sharded model: gathers the weights once per call where they fit, otherwise unit by unit for every token."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from hf_dist.dist import collectives
from hf_dist.dist.collective_guard import every_rank
from hf_dist.dist.host_info import free_nbytes
from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.format_bytes import size_text
from hf_dist.log import say_once
from hf_dist.sharding.full_params import unsharded
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.placement import Placement
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.units import containers

__all__ = ["let_generate"]

_SHARE = 0.5
"""Share of the free memory for full weights. The rest holds the key-value cache and activations."""


def let_generate(engine: Engine) -> None:
    """Make the prepared model, and every module that contains all its units, gather the weights once per `generate(_batch)`.

    Local, but `generate` is collective afterwards: every rank calls it, with any number of prompts and any lengths. Inside the
    caller's own `with hf_dist.gathered(model):` nothing is sent, and each rank may call it as often as it likes. Nothing
    changes where each rank has all weights.
    """
    sharded = engine.sharded
    shares = sharded.placements.params is Placement.SHARD and sharded.mesh.shard.size > 1
    if not shares and sharded.mesh.axes.size("ep") == 1:
        return
    for module in containers(sharded.model, sharded.units):
        # It makes HF's `generate` keep all ranks in step until the longest sequence is done.
        module.__dict__["_is_fsdp_managed_module"] = True
        for name, instead in (("generate", _generate), ("generate_batch", _generate_batch)):
            if hasattr(type(module), name):
                replace_method(module, name, functools.partial(instead, weakref.ref(sharded)))


def _generate(reference: weakref.ref[ShardedModel], model: Any, *args: object, **kwargs: object) -> object:
    generate = type(model).generate
    sharded = reference()
    if sharded is None:
        return generate(model, *args, **kwargs)
    # Every forward sends tokens to experts on other ranks, so a rank that is done must continue for the others.
    spread = sharded.mesh.axes.size("ep") > 1
    if all(group.pins and group.full.is_current for group in sharded.groups):  # inside a block that gathered everything
        return generate(model, *args, **{**kwargs, "synced_gpus": spread})
    every_rank(sharded.mesh, "model.generate()")
    needed = sum(g.layout.numel * g.full.values.element_size() for g in sharded.groups if not g.full.is_allocated)
    if not _fits(sharded, needed):
        say_once(
            f"generate: the {size_text(needed)} of full weights do not fit into the free memory, so every token gathers them "
            "unit by unit, which is slow. Use more ranks, shorter prompts, or offload optimizer state to make room."
        )
        return generate(model, *args, **{**kwargs, "synced_gpus": True})
    with unsharded(sharded.model, after=lambda group, changed: None, slices=True):
        # No rank waits for another inside, so a rank that is done need not continue.
        return generate(model, *args, **{**kwargs, "synced_gpus": spread})


def _generate_batch(reference: weakref.ref[ShardedModel], model: Any, *args: object, **kwargs: object) -> object:
    """HF's continuous batching on weights gathered once. Ranks run different numbers of forwards, each in its own thread."""
    generate = type(model).generate_batch
    sharded = reference()
    if sharded is None:
        return generate(model, *args, **kwargs)
    if sharded.mesh.axes.size("ep") > 1:
        raise ModelError(
            "generate_batch: every forward sends tokens to experts on other ranks (expert_parallel), and the ranks run "
            "different numbers of forwards. Use model.generate, or set expert_parallel.enabled to false."
        )
    with unsharded(sharded.model, after=lambda group, changed: None, slices=True):
        return generate(model, *args, **kwargs)


def _fits(sharded: ShardedModel, needed: int) -> bool:
    """Whether all ranks of `shard` have room for `needed` more bytes. Equal on those ranks. Collective over `shard`."""
    mine = needed <= _SHARE * (free_nbytes(sharded.mesh.device) or 0)
    return all(collectives.all_gather_object(sharded.mesh.shard, mine))
