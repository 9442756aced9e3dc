"""What encoded messages have left out so far (error feedback), in a checkpoint: one tensor per rank, group and message.

    residual.<rank>.<wire>.<message>.<first parameter of the group>

It belongs to the rank and to the layout that sent the messages. The same layout goes on bit for bit; another one begins with
nothing left out, and the log says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hf_dist.dist.coded import Residual
from hf_dist.log import warn_once
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["fill_residuals", "sender_of", "stored_residuals"]

_PREFIX = "residual."


def stored_residuals(
    sharded: ShardedModel, take: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values) of this rank's. Local. `take`: how a tensor enters the checkpoint."""
    own = f"{_PREFIX}{sharded.mesh.world.rank}."
    for name, residuals in _by_wire(sharded):
        for message, residual in residuals.items():
            if residual.values is not None:
                key = f"{own}{name.format(message=message)}"
                yield key, take(key, residual.values)


def sender_of(sharded: ShardedModel) -> str | None:
    """The layout that residuals belong to, in words that are equal on all ranks; None if messages leave nothing out."""
    placements = sharded.placements
    if not placements.wires.keeps:
        return None
    digest = hashlib.sha1(repr(placements).encode(), usedforsecurity=False).hexdigest()
    return f"{sharded.mesh.axes.describe()}, placements {digest[:8]}"


def fill_residuals(
    sharded: ShardedModel,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[dict[str, Any]], None],
    sender: object,
) -> None:
    """Load this rank's, if `sender` (`sender_of` at the save) is this layout; else begin with nothing left out. Local."""
    wires = list(_by_wire(sharded))
    for _, residuals in wires:
        residuals.clear()
    here = sender_of(sharded)
    if here is None:
        return
    if sender != here:
        if any(name.startswith(_PREFIX) for name in stored):
            warn_once(
                "error feedback begins again: what messages had left out belongs to the layout that saved the checkpoint "
                f"({sender}; here {here})"
            )
        return
    wanted: dict[str, Any] = {}
    own = f"{_PREFIX}{sharded.mesh.world.rank}."
    for name, residuals in wires:
        before, after = (own + name).split("{message}")
        for key in stored:
            if key.startswith(before) and key.endswith(after):
                residual = residuals.setdefault(key[len(before) : len(key) - len(after)], Residual())
                shape, dtype = stored[key]
                residual.values = torch.empty(shape, dtype=dtype, device=sharded.mesh.device)
                wanted[key] = residual.values
    if wanted:
        read(wanted)


def _by_wire(sharded: ShardedModel) -> Iterator[tuple[str, dict[str, Residual]]]:
    for group in sharded.trainable_groups:
        for name, wire in group.messages.items():
            if wire.feedback:
                yield f"{name}.{{message}}.{group.layout.slots[0].name}", wire.residuals
