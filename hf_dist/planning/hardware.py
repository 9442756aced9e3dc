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
    float8: float = 800e12
    """FLOP of matrix products in float8, with a scale per tensor.

    Source: torchtitan's steps of Llama-3 8B on 8 H100, compiled (`benchmarks/llama3_h100_202412_torchtitan.md`): 6,667 tokens
    per second and GPU in bf16, 8,532 in float8, so 0.54 s of 2.46 s are saved for 16,384 tokens. Casts (`eights.py`) add 0.15 s
    at 1.86 TB/s: the products save 0.69 s. They are 6.9e14 FLOP, 1.53 s at `flops`, which leaves 0.84 s: 820 TFLOP/s. If every
    second product of forward runs again, as its checkpointing may let it, they are 8.0e14 FLOP, and 730 TFLOP/s. From 6,150 and
    7,690 tokens per second and GPU (torchao's README of float8) in the same way: 840 and 750 TFLOP/s.
    """
    float8_rows: float = 550e12
    """The same with a scale per row, which only products of forward have.

    Source: in the same way from 6,150 and 6,768 tokens per second and GPU for 8,192 tokens (torchao's README of float8), with
    `float8` for products of backward: 520 to 570 TFLOP/s.
    """
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
