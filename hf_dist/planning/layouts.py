"""The possible layouts of a model on a number of ranks: sizes of all axes, ZeRO stage, microbatches and recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_dist.config import DistConfig
from hf_dist.sharding.placement import ZERO_STAGES, Placement, StatePlacements, Stay, once_per_window

__all__ = ["RECOMPUTED", "Layout", "Shape", "Wanted", "layouts"]

RECOMPUTED = ("nothing", "selective", "blocks")
"""What backward recomputes; "selective" is everything except matrix products and attention."""
_MICRO = (1, 2, 4, 8)
_MOST_CP, _LEAST_TOKENS = 16, 2048
"""Most ranks that share a sequence, and fewest tokens that each of them gets."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model that decide which sizes are possible."""

    blocks: int
    heads: int
    key_heads: int
    experts: tuple[int, ...] = ()
    """Number of experts, for each kind of expert layer."""


@dataclass(frozen=True)
class Wanted:
    """The job to find layouts for."""

    ranks: int
    rows: int
    """Rows of the global batch."""
    seq: int
    ranks_per_machine: int


class Rounds(NamedTuple):
    """How often a step gathers all weights for forwards and for backwards, and reduces all gradients."""

    forward: int
    backward: int
    reductions: int


@dataclass(frozen=True)
class Layout:
    """One layout."""

    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    stage: int = 0
    micro: int = 1
    microbatches: int = 1
    recomputed: str = "nothing"
    virtual: int = 1
    reshard: bool = False
    """Whether a pipeline frees weights (stage 3) and reduces gradients (2, 3) in every microbatch, as others always do."""
    over: bool = False
    """Whether the optimizer is sharded over the copies of a shard, too."""

    @property
    def place(self) -> tuple[int, ...]:
        """Where everything is held: all sizes except microbatches and recomputation."""
        sizes = (self.pp, self.tp, self.cp, self.ep, self.dp_replicate, self.dp_shard)
        return (*sizes, self.stage, self.reshard, self.over)

    @property
    def text(self) -> str:
        """For example `pp 2 x tp 8 x dp_shard 4, ZeRO 1`."""
        sizes = [(name, getattr(self, name)) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
        named = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "1 rank"
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        every = " every microbatch" if self.reshard else ""
        over = ", optimizer over all" if self.over else ""
        return f"{named}{experts}, ZeRO {self.stage}{every}{over}"

    @property
    def placements(self) -> StatePlacements:
        """What a rank holds of weights, gradients and optimizer state."""
        row = replace(ZERO_STAGES[self.stage], copies=Placement.SHARD if self.over else Placement.REPLICATE)
        return once_per_window(row) if self.pp > 1 and not self.reshard else row

    @property
    def rounds(self) -> Rounds:
        """How often a step moves all weights or gradients over their shards."""
        states, number = self.placements, self.microbatches
        reductions = number if states.grads is Placement.SHARD else 1
        if states.params is Placement.SHARD and states.stay is Stay.USE:
            return Rounds(number, number, reductions)
        return Rounds(1 if states.optim is Placement.SHARD else 0, 0, reductions)

    @property
    def values(self) -> dict[str, object]:
        """The config keys, by JSON path, without defaults."""
        found: dict[str, object] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.microbatches,
            "zero_optimization.stage": self.stage,
        }
        if self.dp_replicate > 1 and (self.over or self.placements.params is Placement.SHARD):
            found["zero_optimization.mics_shard_size"] = self.dp_shard * self.cp
        if self.over:
            found["hf_dist.optimizer_over"] = "all"
        if self.pp > 1:
            found |= {"pipeline.stages": self.pp}
        if self.virtual > 1:
            found |= {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": self.virtual}
        if self.reshard:
            found["pipeline.reshard_per_microbatch"] = True
        if self.tp > 1:
            found |= {"tensor_parallel.autotp_size": self.tp, "tensor_parallel.tp_overlap_comm": True}
        if self.cp > 1:
            found["sequence_parallel_size"] = self.cp
        if self.ep > 1:
            found |= {"expert_parallel.enabled": True, "expert_parallel.autoep_size": self.ep}
        if self.recomputed != "nothing":
            found["activation_checkpointing.every_n_layers"] = 1
        if self.recomputed == "selective":
            found["activation_checkpointing.selective"] = True
        return found

    def of(self, config: DistConfig) -> DistConfig:
        """`config` with this layout's keys."""
        return config.replaced({path: (value, "plan") for path, value in self.values.items()})


def layouts(shape: Shape, wanted: Wanted) -> Iterator[Layout]:
    """All layouts whose sizes divide. Every rank of a machine is used, and `tp` stays within a machine."""
    here = min(wanted.ranks, wanted.ranks_per_machine)
    sizes = itertools.product(
        _powers(min(shape.blocks, wanted.ranks)),
        [size for size in _powers(here) if _cuts_heads(shape, size)],
        [size for size in _powers(_MOST_CP) if size == 1 or wanted.seq // size >= _LEAST_TOKENS],
    )
    for pp, tp, cp in sizes:
        if wanted.ranks % (pp * tp * cp) or (cp > 1 and wanted.seq % cp):
            continue
        data = wanted.ranks // (pp * tp * cp)
        for ep in _experts(shape, data * cp):
            for copies, stage, reshard, over in _stages(data, cp, ep, here // tp or 1, pp):
                place = Layout(pp, tp, cp, ep, copies, data // copies, stage, reshard=reshard, over=over)
                yield from _batches(wanted, shape, place, data)


def _batches(wanted: Wanted, shape: Shape, place: Layout, data: int) -> Iterator[Layout]:
    for micro in _MICRO:
        if wanted.rows % (micro * data):
            continue
        count = wanted.rows // (micro * data)
        virtual = [1, *(v for v in (2, 4) if place.pp > 1 and shape.blocks >= place.pp * v and count >= place.pp)]
        if count < place.pp:
            continue
        for recomputed, parts in itertools.product(RECOMPUTED, virtual):
            yield replace(place, micro=micro, microbatches=count, recomputed=recomputed, virtual=parts)


def _stages(data: int, cp: int, ep: int, here: int, pp: int) -> Iterator[tuple[int, int, bool, bool]]:
    """(replicas, stage, every microbatch, optimizer over all): ZeRO over all ranks, or within machines.

    A pipeline reduces once, so that stage 2 equals 1, unless it does so in every microbatch.
    """
    shards = data * cp
    if shards == 1:
        yield 1, 0, False, False
        return
    stages = (1, 3) if pp > 1 else (1, 2, 3)
    for stage in stages:
        yield 1, stage, False, False
    for stage in (2, 3) if pp > 1 else ():
        yield 1, stage, True, False
    for among in (here, 2 * here, 4 * here):
        if among < shards and shards % among == 0 and among % cp == 0 and among % ep == 0 and among > 1:
            yield shards // among, 3, False, False
            for stage in stages:
                yield shards // among, stage, False, True


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def _experts(shape: Shape, ranks: int) -> list[int]:
    return (
        [size for size in _powers(ranks) if all(count % size == 0 for count in shape.experts)] if shape.experts else [1]
    )


def _cuts_heads(shape: Shape, size: int) -> bool:
    """Whether `size` ranks can split the heads; ranks beyond the key heads share them (`parallel/tensor/slices.py`)."""
    return shape.heads % size == 0 and (shape.key_heads % size == 0 or size % shape.key_heads == 0)
