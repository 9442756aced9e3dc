"""Weights that are not finite: the first step that made them, and the first parameter that has one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.training_state import owned_parts
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["first_not_finite", "trained_not_finite", "trained_parameters"]

_CHUNK = 1 << 22
"""Elements looked at together: states on disk are read in parts."""


def trained_parameters(sharded: ShardedModel) -> frozenset[str]:
    """Names of the parameters that are trained on this rank. A frozen one may hold an infinity on purpose."""
    return frozenset(slot.name for group in sharded.groups if group.trainable for slot in group.layout.slots)


@torch.no_grad()
def first_not_finite(parts: Iterable[OwnedPart], trained: Collection[str]) -> str | None:
    """The first parameter of `parts` with an infinity or nan, by name; None if there is none. Local; reads the parts once."""
    for part in parts:
        if part.name not in trained:
            continue
        for start in range(0, part.stop - part.start, _CHUNK):
            values = part.values[start : min(start + _CHUNK, part.stop - part.start)]
            # A sum needs no memory; that of finite numbers may overflow, and is looked at again.
            if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
                return part.name
    return None


def trained_not_finite(sharded: ShardedModel) -> str | None:
    """`first_not_finite` of the weights that this rank would write; of replicas that train alone, the first's. Local."""
    return first_not_finite(
        (part for _, part in owned_parts(sharded, lambda _, value: value)), trained_parameters(sharded)
    )
