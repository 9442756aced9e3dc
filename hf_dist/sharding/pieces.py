"""Pieces of a shard, one on each of its copies: the optimizer's part of it, where the optimizer is sharded over everything.

    gradient of the shard   summed over the window by each copy; then one reduce-scatter over the copies
    piece of the mean       read, and stepped into the masters, which are a piece as well
    weights of the shard    one all-gather over the copies after the step; the gathers of passes stay among the shard's ranks

The bytes between copies are those of one reduce-scatter and one all-gather in a step, whatever the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dist.dist import coded, collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.memory.offload.host import Gradient, HostLink
from hf_dist.sharding.messages import Message, scattered_mean
from hf_dist.tensors.codecs import Codec

__all__ = ["ShardGradient", "gather_pieces"]


def gather_pieces(shard: torch.Tensor, outer: Sequence[MeshAxis], codec: Codec | None = None) -> collectives.Handle:
    """Start to fill `shard` (1-D, all pieces in order) with the other copies' pieces; this rank's own is in its place.

    Collective over the axes of `outer` (`GroupAxes.outer`), the last of which cuts finest. `codec`: of pieces between copies
    on other machines (`dp_replicate`); the own one is then replaced by what the others get.
    """
    handle = collectives.Handle([])
    for k in reversed(range(len(outer))):
        handle.wait()
        part = shard
        for axis in outer[:k]:
            part = part.chunk(axis.size)[axis.rank] if part.numel() else part
        if codec is not None and outer[k].name == "dp_replicate":
            own = part.chunk(outer[k].size)[outer[k].rank] if part.numel() else part
            handle = coded.all_gather(outer[k], own, part, codec)
        else:
            handle = collectives.all_gather(outer[k], part)
    return handle


class ShardGradient:
    """The gradient of a whole shard, which awaits the reduce-scatter over the copies at the end of the window."""

    def __init__(self, gradient: Gradient) -> None:
        """`gradient`: sums the window's reductions, on the tier of the optimizer's gradient."""
        self._sum = gradient
        self._part: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor | None:
        """The sum so far, 1-D over the shard; None if there is none, or if its reduce-scatter has begun."""
        return self._sum.values

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory kept between windows."""
        return self._sum.host_nbytes

    def add(self, reduced: torch.Tensor) -> None:
        """Add a mean over the shard's ranks. Local."""
        self._sum.add(reduced)

    def scatter(
        self, axis: MeshAxis, gradient: Gradient, is_last: bool, wire: Message | None, link: HostLink
    ) -> collectives.Handle:
        """Start to average over `axis`, of which this rank keeps its piece; it is added to `gradient` after the last axis.

        Collective over `axis`. Afterwards the next window's sum may begin.
        """
        if self._part is None:
            values = self._sum.on_device()
            self._sum.drop()
        else:
            values, self._part = self._part, None
        out = values.new_empty(values.numel() // axis.size)
        handle = scattered_mean(axis, values, out, wire, link)

        def finish() -> None:
            if is_last:
                gradient.add(out)
            else:
                self._part = out

        return collectives.Handle([handle], finish)

    def drop(self) -> None:
        """Forget the sum. Local."""
        self._sum.drop()
        self._part = None
