"""Temporary access to full parameters: `gathered()` for users, `full_tensors()` for saving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.memory.offload.resting import opened
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.lazy import copy_overlap
from hf_dist.sharding.param_slice import held_slice
from hf_dist.sharding.pieces import gather_pieces
from hf_dist.sharding.prepared import OWNER
from hf_dist.sharding.slices import enter_whole, joined, leave_whole
from hf_dist.tensors.checksum import as_bytes

__all__ = ["all_tensors", "full_gradient", "full_shape", "full_tensors", "gathered", "whole_tensors"]


@contextmanager
def gathered(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Inside the block, the parameters of `what` are full and readable, at every ZeRO stage and even after a forward in it.

    Collective: every rank enters and leaves. With `modifier_rank`, all ranks take the changes made by this global rank (master
    weights included) and discard their own. That rank holds only the weights of its own pipeline stage; on the other stages
    the rank with the same data (`rank % data ranks`) takes its place.
    Without `modifier_rank`, change nothing: sharded weights would lose the change and replicated weights would diverge
    between ranks. A warning reports it. Counterpart of DeepSpeed's `GatheredParameters`.
    Raises `ModelError` for parameters that hf_dist does not hold and for a rank that does not exist.
    """

    def after(group: FlatGroup, changed: bool) -> None:
        if modifier_rank is not None:
            _adopt_changes(group, modifier_rank, changed)
        elif changed:
            warn_once(
                f"weights ({group.layout.slots[0].name} or a neighbour) were changed inside `gathered` without "
                "modifier_rank: name the rank whose changes all ranks take, or changes are lost or differ between ranks"
            )

    what = list(what) if isinstance(what, Iterable) and not isinstance(what, (nn.Module, nn.Parameter)) else what
    for group in _groups_of(what)[:1] if modifier_rank is not None else ():
        world = group.mesh.world.size
        if modifier_rank not in range(world):
            raise ModelError(
                f"modifier_rank: {modifier_rank} is not a rank of this job. Name one of its {world} ranks, 0 to {world - 1}."
            )
    with unsharded(what, after, writer=modifier_rank):
        yield


@contextmanager
def unsharded(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    after: Callable[[FlatGroup, bool], None],
    *,
    slices: bool = False,
    writer: int | None = None,
) -> Iterator[None]:
    """Like `gathered`, but `after(group, changed)` runs for each group at the end and decides what happens to changes.

    Collective. `slices`: keep parameters that are cut along `tp` as slices. Otherwise they are whole inside the block, and
    afterwards their slices take the changes of global rank `writer` (None: each rank its own).
    """
    groups = _groups_of(what)
    # Inside another block, or in a forward: not ours to free.
    was_full = {id(group) for group in groups if group.full.is_current}
    was_hidden = {id(group) for group in groups if group.is_cut and group.full.is_guarded}
    for group in groups:
        group.pins += 1
        group.unshard()
    for group in groups:
        group.wait_unshard()
    whole = {id(group) for group in groups if not slices and enter_whole(group)}
    versions = [[p._version for p in group.params] for group in groups]
    try:
        yield
    finally:
        for group, before in zip(groups, versions, strict=True):
            group.pins -= 1
            if id(group) in whole:
                leave_whole(group, None if writer is None else group.mesh.axes.coordinate("tp", writer))
            moved = group.take_moved()
            after(group, moved or before != [p._version for p in group.params])
            if group.full.writable and not group.is_replicated:
                group.full.writes.watch()
            if id(group) not in was_full or (group.is_replicated and id(group) in was_hidden):
                group.reshard()


@torch.no_grad()
def _adopt_changes(group: FlatGroup, modifier_rank: int, changed: bool) -> None:
    """Give one rank's full weights to all. Collective over dp, tp and the pipeline stages that hold the group."""
    if group.share is None:
        collectives.broadcast(group.mesh.tp, group.full.values, group.mesh.axes.coordinate("tp", modifier_rank))
    source = group.mesh.axes.coordinate("dp", modifier_rank)
    # Over the ranks that hold these very elements. For other slices, the source is the rank at the modifier's coordinates.
    copies = [row.axis for row in group.axes.then if not row.at_end]
    for axis in (group.axes.shard, *copies):
        collectives.broadcast(axis, group.full.values, group.mesh.axes.coordinate(axis.name, modifier_rank))
    for holders in (row.axis for row in group.axes.then if row.between_stages):
        # Copies on several stages must stay equal: take them from the first stage that wrote.
        wrote = torch.tensor([changed], dtype=torch.int32, device=group.mesh.device)
        collectives.broadcast(group.mesh.dp, wrote, source)
        stages = collectives.all_gather_object(holders, bool(wrote))
        if True in stages:
            collectives.broadcast(holders, group.full.values, stages.index(True))
    if group.adopt_full():
        group.write_back()
        group.rest.storage.link.wait_device()
    if group.full.writable:
        group.full.writes.watch()


def _groups_of(what: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[FlatGroup]:
    if isinstance(what, nn.Module):
        params: list[Any] = list(what.parameters())
    else:
        params = [what] if isinstance(what, nn.Parameter) or not isinstance(what, Iterable) else list(what)
    for p in params:
        _check_tensor(p)
    groups: dict[int, FlatGroup] = {}
    for p in params:
        if not hasattr(p, OWNER):
            raise ModelError(
                f"a parameter of shape {tuple(p.shape)} does not belong to a model prepared by hf_dist; pass the model "
                "(or its parameters) after `hf_dist.initialize` or `prepare`"
            )
        group = getattr(p, OWNER)[0]()
        groups[id(group)] = group
    return list(groups.values())


def _check_tensor(found: object) -> None:
    if not isinstance(found, torch.Tensor):
        raise ModelError(f"expected a module, a parameter or parameters, found {type(found).__name__}: {found!r:.80}")


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """An fp32 copy of the gradient that the optimizer will step, in the parameter's full shape (also if it is cut along `tp`).

    None before the first gradient. Collective: every rank that holds a part calls it, after the last backward of a window.
    In fp16 it includes the loss scale until gradients are clipped. Counterpart of DeepSpeed's `safe_get_full_grad`. Raises
    `ModelError` for a parameter that hf_dist does not hold.
    """
    (group,) = _groups_of(param)
    if group.access is None:
        return None
    whole = group.access.whole(param)
    if whole is not None and group.keeps_own:
        collectives.all_reduce(group.axes.shard, whole.view(-1), "mean").wait()
    elif whole is not None and group.resting != (0, group.layout.numel):
        for axis in group.axes.among:
            collectives.all_reduce(axis, whole, op="sum").wait()
    if whole is not None:
        for row in group.access.to_combine():  # on this copy only: the window combines the gradient itself at its end
            collectives.all_reduce(row.axis, whole.view(-1), row.operation).wait()
    if whole is None or group.share is None:
        return whole
    return joined(group, next(i for i, p in enumerate(group.params) if p is param), whole)


def full_shape(param: nn.Parameter) -> torch.Size:
    """The shape of a parameter in the whole model. Local; works at any time and for any parameter, prepared or not.

    With `tensor_parallel`, a rank keeps a slice of most matrices and `param.shape` is the slice's shape.
    """
    _check_tensor(param)
    return torch.Size(held_slice(param).whole)


def full_tensors(group: FlatGroup) -> Iterator[tuple[ParamSlot, torch.Tensor]]:
    """Yield (slot, full tensor on the device) of each parameter, in the dtype it was loaded in.

    Collective over the shard axis, and over the copies that have pieces of a shard. A parameter cut along `tp` yields its
    slice. Values come from the fp32 master weights if there are any, so a model loaded in fp32 and trained in bf16 is saved
    with all its bits.
    """
    group.take_writes()
    wide = group.source.dtype if torch.float32 in group.loaded_dtypes else group.dtype
    full = torch.zeros(group.layout.numel, dtype=wide, device=group.mesh.device)
    start, stop = group.resting
    with opened(group.master) as masters:
        full[start:stop].copy_(masters)
    if stop - start < group.layout.numel:
        gather_pieces(full[slice(*group.at_rest.gathered)], group.axes.outer).wait()
        collectives.all_gather(group.axes.shard, full).wait()
    for slot, dtype in zip(group.layout.slots, group.loaded_dtypes, strict=True):
        yield slot, full[slot.offset : slot.stop].view(slot.shape).to(dtype)


def whole_tensors(group: FlatGroup) -> Iterator[tuple[ParamSlot, torch.Tensor]]:
    """Like `full_tensors`, with slices joined to the shapes in files. Collective over the group's shard axis and its parts."""
    for index, (slot, tensor) in enumerate(full_tensors(group)):
        yield slot, joined(group, index, tensor)


def all_tensors(sharded: Any, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of every parameter of a `ShardedModel`, on all pipeline stages. Collective: every rank.

    `frozen=False`: only trainable parameters.
    """
    pp = sharded.mesh.pp
    for stage in range(pp.size):
        groups = [g for g in (sharded.groups if frozen else sharded.trainable_groups) if g.axes.is_first_holder]
        rows = [
            (s.name, s.held.whole, dtype)
            for g in groups
            for s, dtype in zip(g.layout.slots, g.loaded_dtypes, strict=True)
        ]
        own = (tensor for group in groups for _, tensor in whole_tensors(group))
        for name, shape, dtype in collectives.broadcast_object(pp, rows, stage):
            tensor = next(own) if stage == pp.rank else torch.empty(shape, dtype=dtype, device=sharded.mesh.device)
            if pp.size > 1:
                collectives.broadcast(pp, as_bytes(tensor), stage)
            yield name, tensor


def load_full_tensor(group: FlatGroup, slot: ParamSlot, value: torch.Tensor) -> None:
    """Overwrite the stored weights of one parameter from its full value. Local. Call `weights_changed()` afterwards."""
    if tuple(value.shape) != slot.held.whole:
        raise ModelError(f"{slot.name}: the checkpoint has shape {tuple(value.shape)}, the model {slot.held.whole}")
    with opened(group.master, changed=True) as masters:
        copy_overlap(masters, group.resting[0], slot.held.take(value).to(masters.device).reshape(-1), slot.offset)
    group.masters_changed()
