"""The mean of a gradient over the ranks of an axis: what it sends, as it is or encoded, and what error feedback keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_dist.dist.axes import HOPS
from hf_dist.tensors.codecs import Codec

__all__ = ["Mean", "Sent"]


class Sent(NamedTuple):
    """One collective."""

    axis: str
    op: str
    ranks: int
    nbytes: int
    """Of all ranks' parts together; twice that is sent of an all-reduce."""


@dataclass(frozen=True)
class Mean:
    """One reduction, as `sharding/messages.py` makes it."""

    axis: str
    ranks: int
    numel: int
    dtype: torch.dtype
    whole: bool
    """Whether each rank gets all of it, and not its part."""
    near: int = 1
    """Adjacent ranks that add up an encoded one among themselves before others; 1: one hop."""

    def part(self, codec: Codec) -> int:
        """Elements that one rank adds up of encoded messages."""
        if not self.whole:
            return self.numel // self.ranks
        return -(-self.numel // (self.ranks * codec.block)) * codec.block

    def sent(self, codec: Codec | None) -> Iterator[Sent]:
        """Its collectives; `codec`: of its messages, None for numbers as they are."""
        if codec is None:
            nbytes = self.numel * self.dtype.itemsize
            yield Sent(self.axis, "all_reduce" if self.whole else "reduce_scatter", self.ranks, nbytes)
            return
        row = codec.nbytes(self.part(codec))
        if self.near > 1:
            far = self.ranks // self.near
            yield Sent(HOPS[0], "all_to_all", self.near, self.ranks * row)
            yield Sent(HOPS[1], "all_to_all", far, far * row)
        else:
            yield Sent(self.axis, "all_to_all", self.ranks, self.ranks * row)
        if self.whole:
            yield Sent(self.axis, "all_gather", self.ranks, self.ranks * row)

    def left_out(self, codec: Codec) -> int:
        """Elements that error feedback keeps (`Wire.residuals`): of all parts, of the sums between hops, of the own mean."""
        if self.ranks == 1:
            return 0
        sums = self.ranks // self.near if self.near > 1 else 0
        return (self.ranks + sums + int(self.whole)) * self.part(codec)
