"""Rough speeds of a job's machines. Only ratios are meaningful. The figures equal those of `tests/gpu_sim/costs.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.dist.axes import RANKS_PER_MACHINE, Axes

__all__ = ["Hardware", "Link", "link_of"]


@dataclass(frozen=True)
class Hardware:
    """Speeds per rank and second."""

    flops: float = 450e12
    """FLOP of matrix products in half precision, as training achieves them."""
    memory: float = 2.6e12
    """Bytes that kernels read and write."""
    inside: float = 300e9
    """Bytes that a rank sends to ranks of its machine."""
    between: float = 50e9
    """Bytes that a rank sends to other machines."""
    host: float = 25e9
    """Bytes between a device and its host."""
    latency: float = 20e-6
    """Seconds of a collective without data."""
    ranks_per_machine: int = RANKS_PER_MACHINE


@dataclass(frozen=True)
class Link:
    """How the ranks along an axis are connected."""

    ranks: int
    here: int
    """Number of these ranks on one machine."""

    def split(self, nbytes: int, *, pairwise: bool = False) -> tuple[int, int]:
        """(inside, between): how many of a rank's sent bytes stay on its machine, and how many leave it.

        A ring passes all ranks of a machine before it leaves it, with as many rings as ranks. With `pairwise` a rank sends
        every other rank the same amount.
        """
        if self.here >= self.ranks:
            return nbytes, 0
        leaves = nbytes * (self.ranks - self.here) // (self.ranks - 1) if pairwise else nbytes // self.here
        return nbytes - leaves, leaves


def link_of(axes: Axes, axis: str, ranks_per_machine: int) -> Link:
    """The link of the first line along an axis or view. Ranks of a machine have consecutive numbers."""
    line: Sequence[int] = axes.line(axis, 0) if axes.size(axis) > 1 else [0]
    machines: dict[int, int] = {}
    for rank in line:
        machines[rank // ranks_per_machine] = machines.get(rank // ranks_per_machine, 0) + 1
    return Link(len(line), min(machines.values()))
