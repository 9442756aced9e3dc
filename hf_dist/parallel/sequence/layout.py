"""Which positions of a sequence each rank computes.

    cp = outer x ulysses        neighbours exchange heads for positions; outer ranks gather keys and values or pass them round

Rows are cut in order. In a ring each outer rank gets two chunks, one from either end (zigzag), so that causal attention
costs the same on all ranks. Source: Ulysses arXiv 2309.14509; ring arXiv 2310.01889; zigzag arXiv 2311.09431 (striped) and
Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

Exchange = Literal["gather", "ring"]


@dataclass(frozen=True)
class SequenceLayout:
    """How the ranks of `cp` share a sequence."""

    ulysses: int
    """Neighbouring ranks that exchange heads for positions."""
    outer: int = 1
    """Number of Ulysses groups, each with its own positions in attention."""
    exchange: Exchange = "gather"
    """How keys and values reach the other groups."""

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.ulysses * self.outer

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go round a ring, and positions are assigned from both ends."""
        return self.outer > 1 and self.exchange == "ring"

    @property
    def multiple(self) -> int:
        """Sequences are padded to a multiple of this."""
        return self.size * (2 if self.is_ring else 1)

    def padded(self, length: int) -> int:
        """The padded length for a sequence of `length` tokens."""
        return -(-length // self.multiple) * self.multiple

    def chunks_of(self, outer: int) -> tuple[int, ...]:
        """The chunks of a sequence that an outer rank has, in its order."""
        return (outer, 2 * self.outer - 1 - outer) if self.is_ring else (outer,)

    def positions(self, rank: int, length: int) -> torch.Tensor:
        """(length / size,) positions of a rank of `cp`, ascending within each chunk. `length`: padded."""
        return _positions(self, rank, length)

    def undo(self, length: int) -> torch.Tensor | None:
        """The index that sorts the concatenated parts of all ranks; None if they are already sorted."""
        return _undo(self, length) if self.is_ring else None

    def positions_on(self, device: torch.device, rank: int, length: int) -> torch.Tensor:
        """`positions`, cached on a device, because a copy from the host would block it."""
        return _on_device(self, device, rank, length)

    def undo_on(self, device: torch.device, length: int) -> torch.Tensor | None:
        """`undo`, cached on a device."""
        return _on_device(self, device, None, length) if self.is_ring else None

    def describe(self) -> str:
        """For example `ulysses 4`, `gather 3`, `ulysses 2 x ring 2`."""
        parts = [("ulysses", self.ulysses), (self.exchange, self.outer)]
        return " x ".join(f"{name} {size}" for name, size in parts if size > 1)


@functools.lru_cache(maxsize=64)
def _positions(layout: SequenceLayout, rank: int, length: int) -> torch.Tensor:
    assert length % layout.multiple == 0, f"{length} tokens are not a multiple of {layout.multiple}"
    outer, inner = divmod(rank, layout.ulysses)
    mine = layout.chunks_of(outer)
    chunks = torch.arange(length).chunk(layout.outer * len(mine))
    return torch.cat([chunks[c] for c in mine]).chunk(layout.ulysses)[inner]


@functools.lru_cache(maxsize=64)
def _undo(layout: SequenceLayout, length: int) -> torch.Tensor:
    return torch.argsort(torch.cat([layout.positions(rank, length) for rank in range(layout.size)]))


@functools.lru_cache(maxsize=64)
def _on_device(layout: SequenceLayout, device: torch.device, rank: int | None, length: int) -> torch.Tensor:
    return (_undo(layout, length) if rank is None else layout.positions(rank, length)).to(device)


def layout_for(size: int, heads: int, wanted: str | tuple[int, int] = "auto") -> SequenceLayout | None:
    """The layout of `size` ranks for a model with `heads` query heads; None if there is none.

    `wanted`: "auto" is Ulysses as far as the heads divide, and gathered keys and values for the rest; "ulysses", "gather" or
    "ring" alone; (ulysses, ring) for both.
    """
    if isinstance(wanted, tuple):
        ulysses, ring = wanted
        fits = ulysses * ring == size and heads % ulysses == 0
        return SequenceLayout(ulysses, ring, "ring") if fits else None
    if wanted == "ring":
        return SequenceLayout(1, size, "ring")
    if wanted == "gather":
        return SequenceLayout(1, size)
    inner = math.gcd(size, heads)
    if wanted == "ulysses":
        return SequenceLayout(size) if inner == size else None
    return SequenceLayout(inner, size // inner)
