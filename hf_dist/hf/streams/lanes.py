"""The lanes of a stream: which rows they have, who owns them, and the one order of all rows. Pure; no data, no processes.

A stream of many shards is cut into a fixed number of lanes, which the checkpoint keeps. Lane l has the shards l, l + L, ...
The global order takes one row of each lane in turn and leaves out lanes that have ended. Row g of the first rounds is in lane
g mod L, so where the number of ranks D divides L, the rows g with g mod D = r are those of the lanes l with l mod D = r:
rank r reads its own lanes only, and every step has the same rows for each such D.

    L = 4   lane 0: a0 a1 a2   lane 1: b0   lane 2: c0 c1   lane 3: d0 d1 d2
    order:  a0 b0 c0 d0 | a1 c1 d1 | a2 d2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from hf_dist.errors import ConfigError, Problem

__all__ = ["Lanes", "Place", "parts_of_window"]


@dataclass(frozen=True)
class Lanes:
    """A number of lanes."""

    number: int

    @staticmethod
    def first(ranks: int, workers: int, shards: int) -> Lanes:
        """Those of a run that begins: one per worker process of each data rank, or one per data rank, at most `shards`.

        A multiple of `ranks`, so that no rank reads the lanes of another; a single one where there are fewer shards than ranks.
        """
        most = min(shards, ranks * max(workers, 1))
        return Lanes(max(most - most % ranks, 1))

    def owner(self, lane: int, ranks: int) -> int:
        """The data rank that reads `lane`."""
        return lane % ranks

    def owned(self, rank: int, ranks: int) -> list[int]:
        """The lanes that data rank `rank` reads."""
        return list(range(rank, self.number, ranks))

    @property
    def ranks_that_work(self) -> list[int]:
        """The numbers of data ranks that can share the lanes."""
        return [ranks for ranks in range(1, self.number + 1) if self.number % ranks == 0]

    def refuse(self, ranks: int) -> None:
        """Raise `ConfigError` if so many data ranks cannot share the lanes."""
        if self.number % ranks:
            *some, last = map(str, self.ranks_that_work)
            raise ConfigError(
                Problem(
                    "train_dataset",
                    f"{self.number} lanes",
                    f"cannot be shared by {ranks} data ranks: that is the number in the checkpoint, or hf_dist.data_lanes",
                    f"Use {', '.join(some)}{' or ' if some else ''}{last} data ranks, or set "
                    'accelerator_config={"dispatch_batches": true}: rank 0 then reads all lanes, for any number of ranks. '
                    '"hf_dist": {"data_lanes": N} sets the number for a new run.',
                )
            )


@dataclass(frozen=True)
class Place:
    """A place in the global order of one epoch: how many rows of each lane came before."""

    rows: tuple[int, ...]
    """By lane."""
    lengths: tuple[int | None, ...]
    """Rows in all, by lane; None where the end has not been seen."""

    @staticmethod
    def start(lanes: Lanes) -> Place:
        """Before the first row."""
        return Place((0,) * lanes.number, (None,) * lanes.number)

    @property
    def sum(self) -> int:
        """Rows before this place."""
        return sum(self.rows)

    @property
    def in_step(self) -> bool:
        """Whether no lane is known to end, so that all ranks can take their own rows without asking each other."""
        return not any(length is not None for length in self.lengths)

    def upcoming(self) -> Iterator[int]:
        """The lane of each next row. Endless as long as a lane has no known end."""
        counts = list(self.rows)
        open_lanes = [lane for lane in range(len(counts)) if self._has(lane, counts[lane])]
        while open_lanes:
            lowest = min(counts[lane] for lane in open_lanes)
            for lane in open_lanes:
                if counts[lane] == lowest:
                    counts[lane] += 1
                    yield lane
            open_lanes = [lane for lane in open_lanes if self._has(lane, counts[lane])]

    def _has(self, lane: int, row: int) -> bool:
        length = self.lengths[lane]
        return length is None or row < length

    def next_lanes(self, count: int) -> list[int]:
        """The lanes of the next `count` rows, fewer at the end of the epoch."""
        return list(islice(self.upcoming(), count))

    def after(self, lanes: Sequence[int]) -> Place:
        """The place behind rows of these lanes."""
        counts = list(self.rows)
        for lane in lanes:
            counts[lane] += 1
        return Place(tuple(counts), self.lengths)

    def ending(self, lengths: dict[int, int]) -> Place:
        """The same place, with the ends of lanes that have been seen meanwhile."""
        return Place(self.rows, tuple(lengths.get(lane, known) for lane, known in enumerate(self.lengths)))


def parts_of_window(rows: int, microbatches: int, whole: int, *, fills: bool) -> list[range]:
    """The rows of each microbatch of all ranks, of a window's `rows` in their order.

    `whole`: rows of a full microbatch of all ranks. With `fills`, the window of fewer rows has all of its `microbatches`, each
    with about as many rows, because HF's loop makes no step of an incomplete window; else it has fewer.
    """
    if rows >= microbatches * whole or not fills:
        return [range(first, min(first + whole, rows)) for first in range(0, rows, whole)]
    edges = [rows * index // microbatches for index in range(microbatches + 1)]
    return [range(first, last) for first, last in pairwise(edges)] if rows else []
