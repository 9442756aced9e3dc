"""How fast a job's machines are: rough figures, of which only ratios mean something; those of `tests/gpu_sim/costs.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.axes import RANKS_PER_MACHINE, Axes

__all__ = ["Hardware", "Link", "link_of"]


@dataclass(frozen=True)
class Hardware:
    """Of one rank, per second."""

    flops: float = 450e12
    """Of matrix products in half precision, as training reaches them."""
    memory: float = 2.6e12
    """Bytes that kernels read and write."""
    inside: float = 300e9
    """Bytes that a rank sends to others of its machine."""
    between: float = 50e9
    """Bytes that a rank sends to other machines."""
    host: float = 25e9
    """Bytes between a device and its host."""
    latency: float = 20e-6
    """Seconds of a collective without bytes."""
    ranks_per_machine: int = RANKS_PER_MACHINE


@dataclass(frozen=True)
class Link:
    """How ranks along an axis are joined."""

    ranks: int
    here: int
    """Of them on one machine."""

    def split(self, nbytes: int, *, pairwise: bool = False) -> tuple[int, int]:
        """(inside, between): of the bytes that a rank sends those that stay on its machine, and those that leave it.

        A ring runs through all ranks of a machine before it leaves it, with as many rings as there are ranks; `pairwise` sends
        every other rank the same.
        """
        if self.here >= self.ranks:
            return nbytes, 0
        leaves = nbytes * (self.ranks - self.here) // (self.ranks - 1) if pairwise else nbytes // self.here
        return nbytes - leaves, leaves


def link_of(axes: Axes, axis: str, ranks_per_machine: int) -> Link:
    """Of the first line along an axis or view; ranks of a machine are neighbours."""
    line: Sequence[int] = axes.line(axis, 0) if axes.size(axis) > 1 else [0]
    machines: dict[int, int] = {}
    for rank in line:
        machines[rank // ranks_per_machine] = machines.get(rank // ranks_per_machine, 0) + 1
    return Link(len(line), min(machines.values()))
