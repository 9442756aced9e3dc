"""Temporarily joins parameters that are cut into slices across ranks."""

from __future__ import annotations

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.prepared import raw_data, set_raw_data
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["enter_whole", "joined", "leave_whole"]


def joined(group: FlatGroup, index: int, part: torch.Tensor) -> torch.Tensor:
    """Join the ranks' slices of a tensor that is cut like parameter `index` of the group; `part` is this rank's slice.

    Collective over the group's `parts` axis; local if the group is not cut.
    """
    axis, held = group.axes.parts, group.layout.slots[index].held
    if axis is None or axis.size == 1:
        return part
    everyone = _slices_of(group, axis)
    mine = [slices[index] for slices in everyone]
    numel = max(s.numel for s in mine)
    full = torch.zeros(axis.size * numel, dtype=part.dtype, device=part.device)
    full[axis.rank * numel : axis.rank * numel + held.numel] = part.detach().reshape(-1)
    collectives.all_gather(axis, full).wait()
    whole = torch.empty(held.whole, dtype=part.dtype, device=part.device)
    for rank, theirs in enumerate(mine):
        theirs.put(full[rank * numel : rank * numel + theirs.numel].view(theirs.shape), whole)
    return whole


def _slices_of(group: FlatGroup, axis: MeshAxis) -> list[list[TensorSlice]]:
    if group.slices is None:
        group.slices = collectives.all_gather_object(axis, [slot.held for slot in group.layout.slots])
    return group.slices


@torch.no_grad()
def enter_whole(group: FlatGroup) -> bool:
    """Make the gathered parameters of `group` whole; False for a group without slices or one that is already whole.

    Collective over `tp`.
    """
    share = group.share
    if share is None or id(group) not in share.groups or id(group) in share.whole:
        return False
    for index, param in enumerate(group.params):
        if not group.layout.slots[index].held.everything:
            set_raw_data(param, joined(group, index, raw_data(param)))
    share.whole.add(id(group))
    if share.whole == share.groups:
        share.use_whole(True)
    return True


@torch.no_grad()
def leave_whole(group: FlatGroup, source: int | None) -> None:
    """Cut the parameters of `group` again, from the values of rank `source` along `tp`, or from this rank's own if None.

    Collective over `tp` with `source`; local without.
    """
    share = group.share
    assert share is not None
    if share.whole == share.groups:
        share.use_whole(False)
    share.whole.discard(id(group))
    for index, (slot, param) in enumerate(zip(group.layout.slots, group.params, strict=True)):
        if slot.held.everything:
            continue
        whole = raw_data(param).contiguous()
        if source is not None:
            collectives.broadcast(group.mesh.tp, whole, source)
        view = group.full.view(index)
        view.copy_(slot.held.take(whole))
        set_raw_data(param, view)
