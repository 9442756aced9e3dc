"""How the reductions of one flat group travel: as they are, or in a wire codec, beside what is computed.

gradients    among the ranks of the shard
copies       among copies of the shard
momentum     among the ranks of the shard, of an optimizer that sends it in place of the gradient
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_dist.dist import coded, collectives
from hf_dist.dist.coded import Tails, Wire
from hf_dist.dist.collectives import Handle
from hf_dist.dist.low_rank import LowRankMean, matrices_of
from hf_dist.dist.mesh import MeshAxis
from hf_dist.memory.offload.host import HostLink
from hf_dist.sharding.group_axes import GroupAxes
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.wires import GroupWires

__all__ = ["Message", "mean", "messages_of", "scattered_mean"]


Message = Wire | LowRankMean


def messages_of(wires: GroupWires, axes: GroupAxes, layout: FlatLayout, feedback: bool) -> dict[str, Message]:
    """The encoded reductions of a group, by name; a reduction without an entry sends numbers as they are. Local."""
    found: dict[str, Message] = {}
    if wires.low_rank is not None:
        slots = [(slot.name, slot.shape, slot.offset) for slot in layout.slots]
        found["gradients"] = LowRankMean(wires.low_rank, *matrices_of(slots, wires.low_rank))
    if wires.gradients is not None:
        found["gradients"] = Wire(wires.gradients, feedback, axes.hops)
    if wires.copies is not None and any(row.between_copies for row in axes.then):
        found["copies"] = Wire(wires.copies, feedback)
    if wires.momentum is not None:
        block, mine = wires.momentum.block, layout.shard(axes.shard.rank)
        tails = {
            "parts": Tails.of(layout.gaps(), (0, layout.numel), block),
            "means": Tails.of(layout.gaps(), mine, block),
        }
        found["momentum"] = Wire(wires.momentum, feedback=True, tails=tails)
    return found


def mean(axis: MeshAxis, tensor: torch.Tensor, wire: Message | None, link: HostLink) -> Handle:
    """Start to average `tensor` (1-D) in place. Collective over `axis`."""
    if wire is None:
        return collectives.all_reduce(axis, tensor)
    return _aside(link, tensor, lambda: wire.all_reduce(axis, tensor))


def scattered_mean(
    axis: MeshAxis, full: torch.Tensor, out: torch.Tensor, wire: Message | None, link: HostLink
) -> Handle:
    """Start to average `full` (1-D, equal parts); each rank gets its part in `out`. Collective over `axis`."""
    if wire is None:
        return collectives.reduce_scatter(axis, full, out)
    assert isinstance(wire, Wire), "a shard is a part of a matrix"
    return _aside(link, full, lambda: coded.reduce_scatter(axis, full, out, wire))


class _Held:
    """Keeps memory until its handle is waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        """Nothing."""


def _aside(link: HostLink, given: torch.Tensor, begin: Callable[[], Handle]) -> Handle:
    """On a GPU, bytes are made and read beside the computation: waiting for them would hold it back between two messages."""
    with link.aside() as arrival:
        handle = begin()
        if link.device.type == "cuda":
            handle.wait()  # the stream's own, which makes the host wait for nothing
    # `given` is memory of the computation's stream, so it stays until that stream waits for this one.
    return Handle([handle, *arrival, _Held(given)])
