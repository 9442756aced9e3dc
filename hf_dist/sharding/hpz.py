"""A second copy of sharded weights among neighbouring ranks, so that every gather except the first stays among them.

    gather from the shards    over all ranks of `shard`, once after the weights have changed
    keep                      at reshard: each neighbour keeps its part of the full weights
    gather from the copy      over the neighbours, until the weights change

With as many neighbours as a machine has ranks, weights cross the network once per step instead of twice per microbatch.
Gradients, masters and optimizer state are not affected.

Source: hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209), section 3.2.
"""

from __future__ import annotations

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.sharding.at_rest import GroupAtRest
from hf_dist.tensors.codecs import Codec


class SecondCopy:
    """This rank's part of the second copy of one group."""

    def __init__(self, axis: MeshAxis, part: torch.Tensor, codec: Codec | None = None) -> None:
        """`axis`: the neighbours; `part`: memory for this rank's part, one of `axis.size` equal parts of the full weights;
        `codec`: of weights that are kept as they arrived from all ranks, encoded (`part` is then uint8)."""
        self.axis = axis
        self._part = part
        self._codec = codec
        self._has_arrived = False
        self.holds = False
        """Whether the part is a copy of the current weights. It changes at the same moments on all ranks."""

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self._part.numel() * self._part.element_size()

    def _own(self, full: torch.Tensor) -> torch.Tensor:
        numel = self._part.numel()
        return full[self.axis.rank * numel : (self.axis.rank + 1) * numel]

    @torch.no_grad()
    def arrived(self, wire: torch.Tensor) -> None:
        """Copy this rank's part of the weights as they arrived (1-D bytes of all ranks), to be kept at `keep`. Local.

        Decoded and encoded again, they would be other numbers."""
        if self._codec is not None:
            self._part.copy_(self._own(wire))
            self._has_arrived = True

    @torch.no_grad()
    def keep(self, full: torch.Tensor) -> None:
        """Copy this rank's part of the current weights. Local."""
        if self.holds or (self._codec is not None and not self._has_arrived):
            return
        if self._codec is None:
            self._part.copy_(self._own(full))
        self.holds = True

    def forget(self) -> None:
        """The weights have changed. At the same moments on all ranks. Local."""
        self.holds = self._has_arrived = False

    @torch.no_grad()
    def gather(self, full: torch.Tensor, rows: int) -> collectives.Handle:
        """Start to fill `full` from the parts. Collective over the neighbours. `rows`: ranks of the shard, each with a row."""
        assert self.holds
        if self._codec is None:
            self._own(full).copy_(self._part)
            return collectives.all_gather(self.axis, full)
        codec, wire = self._codec, self._part.new_empty(self._part.numel() * self.axis.size)
        self._own(wire).copy_(self._part)
        handle = collectives.all_gather(self.axis, wire)
        return collectives.Handle([handle], lambda: codec.decode(wire.view(rows, -1), full.view(rows, -1)))


def second_copy(at_rest: GroupAtRest, axis: MeshAxis | None, device: torch.device) -> SecondCopy | None:
    """Memory for this rank's part among the neighbours on `axis`; None without such copies. Local."""
    if at_rest.second is None or axis is None:
        return None
    part = torch.empty(at_rest.second.numel, dtype=at_rest.second.dtype, device=device)
    return SecondCopy(axis, part, at_rest.wires.weights if at_rest.wires.second else None)
