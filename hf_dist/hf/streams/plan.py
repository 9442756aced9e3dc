"""Who reads which lanes in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.streams.lane_reader import num_shards
from hf_dist.hf.streams.lanes import Lanes
from hf_dist.hf.streams.own_division import divides_rows
from hf_dist.hf.streams.windows import DataRanks, Reads, Shape
from hf_dist.log import say_once

__all__ = ["Plan", "first_lanes", "plan_of"]


@dataclass(frozen=True)
class Plan:
    """How a rank reads."""

    lanes: Lanes
    reads: Reads
    shape: Shape
    ranks: DataRanks
    by_first: bool | None = None
    """What was asked for, as `dispatch_batches`."""

    @property
    def read_here(self) -> list[int]:
        """The lanes that this rank reads."""
        if self.reads is Reads.OWNERS:
            return self.lanes.owned(self.ranks.rank, self.ranks.size)
        return list(range(self.lanes.number)) if self.reads is Reads.ALL or self.ranks.rank == 0 else []


def plan_of(lanes: Lanes, dataset: object, shape: Shape, ranks: Any, *, by_first: bool | None) -> Plan:
    """Who reads `lanes`. `by_first`: as `dispatch_batches`, whether rank 0 reads for all; None: where the lanes have no owners.

    Raises `ConfigError` where they have, and this number of data ranks cannot share them.
    """
    has_owners = (num_shards(dataset) is not None or divides_rows(dataset)) and lanes.number > 1
    if ranks.size == 1:
        reads = Reads.ALL
    elif by_first or not has_owners:
        reads = Reads.ALL if by_first is False else Reads.FIRST
    else:
        lanes.refuse(ranks.size)
        reads = Reads.OWNERS
    return Plan(lanes, reads, shape, ranks, by_first)


def first_lanes(dataset: object, ranks: int, workers: int, asked: int | None) -> Lanes:
    """The lanes of a run that begins; `asked`: in the JSON. A dataset without shards has one for each worker,
    or for each rank where it divides its rows itself.

    Raises `ConfigError` for more lanes than shards.
    """
    shards = num_shards(dataset)
    if shards is None:
        if asked:
            say_once(
                f"hf_dist.data_lanes {asked} has no effect: {type(dataset).__name__} has no shards that could be divided"
            )
        return Lanes(ranks if divides_rows(dataset) else max(workers, 1))
    if asked and asked > shards:
        raise ConfigError(
            Problem(
                "hf_dist.data_lanes",
                str(asked),
                f"a lane has at least one shard, and the dataset has {shards}",
                f"Set at most {shards}, or divide the data into more files.",
            )
        )
    return Lanes(asked) if asked else Lanes.first(ranks, workers, shards)
