"""Rows of several lanes, buffered by lane: read in this process, or by worker processes that each have some of the lanes.

Workers hand over blocks of rows of all of their lanes, so the order of rows does not depend on how many there are. A block is
pickled as a whole: torch would send each tensor of each row through a file descriptor of its own.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from hf_dist.hf.streams.lane_reader import BEGINNING, LaneReader, Mark, has_state
from hf_dist.log import is_speaking_rank, say

__all__ = ["Feed", "LaneBlocks", "Start"]

_SHOWN_ROWS = 10_000
"""Rows to skip from which on a progress bar is worth it."""


@dataclass(frozen=True)
class Start:
    """Where a lane begins: the rows between `mark` and `row` are read again and dropped."""

    mark: Mark = BEGINNING
    row: int = 0


@dataclass
class _Block:
    """What was read of one lane."""

    rows: list[Any]
    marks: list[Mark]
    ended: bool
    skipped: tuple[int, float] = (0, 0.0)
    """Rows and seconds."""


def _opened(
    dataset: Any, lane: int, number: int, epoch: int, start: Start, shows: bool
) -> tuple[LaneReader, tuple[int, float]]:
    """A reader at `start`, and the rows and seconds of the way there where that begins at the first row for want of a state."""
    reader, began = LaneReader(dataset, lane, number, epoch, start.mark), time.perf_counter()
    rows = start.row - start.mark.row
    hidden = not shows or rows < _SHOWN_ROWS or not is_speaking_rank()
    with tqdm(total=rows, desc=f"skipping rows of lane {lane}", unit="rows", disable=hidden or None) as bar:
        for first in range(0, rows, _SHOWN_ROWS // 10):
            reader.skip(part := min(_SHOWN_ROWS // 10, rows - first))
            bar.update(part)
    tells = start.mark.state is None and rows > reader.marks_apart
    return reader, (rows, time.perf_counter() - began) if tells else (0, 0.0)


def _block(reader: LaneReader, count: int, skipped: tuple[int, float] = (0, 0.0)) -> _Block:
    rows = reader.read(count)
    marks, reader.marks = reader.marks, []
    return _Block(rows, marks, reader.ended, skipped)


class Feed:
    """The lanes of one rank in one pass over the data."""

    def __init__(
        self, lanes: Sequence[int], starts: Mapping[int, Start], more: Callable[[int, int], Mapping[int, _Block]]
    ) -> None:
        """`more(lane, count)`: blocks with more rows of that lane, and perhaps of others."""
        self._more = more
        self._rows: dict[int, deque[Any]] = {lane: deque() for lane in lanes}
        self._marks: dict[int, deque[Mark]] = {lane: deque([starts.get(lane, Start()).mark]) for lane in lanes}
        self._ended: set[int] = set()
        self.read = 0
        """Rows that were read for this feed, without those that a resume dropped."""
        self.skipped = (0, 0.0)
        """Rows that a resume read and dropped for want of a state, and seconds."""

    @property
    def lanes(self) -> list[int]:
        """Those of this rank."""
        return list(self._rows)

    def available(self, lane: int, count: int) -> int:
        """How many of the next `count` rows of `lane` there are: all, or those up to its end."""
        rows = self._rows[lane]
        while len(rows) < count and lane not in self._ended:
            self._add(self._more(lane, count - len(rows)))
        return min(len(rows), count)

    def open(self, lane: int) -> None:
        """Come to the beginning of `lane` now, where this process reads it."""
        self._add(self._more(lane, 0))

    def _add(self, blocks: Mapping[int, _Block]) -> None:
        for lane, block in blocks.items():
            self._rows[lane] += block.rows
            self._marks[lane] += block.marks
            self.read += len(block.rows)
            if block.ended:
                self._ended.add(lane)
            self.skipped = (self.skipped[0] + block.skipped[0], self.skipped[1] + block.skipped[1])

    def take(self, lane: int) -> Any:
        """The next row of `lane`, which `available` has found."""
        return self._rows[lane].popleft()

    def mark(self, lane: int, row: int) -> Mark:
        """From where a later run goes on to `row`, which is not before that of the last call. Forgets earlier marks."""
        marks = self._marks[lane]
        while len(marks) > 1 and marks[1].row <= row:
            marks.popleft()
        return marks[0]


def local_feed(dataset: Any, lanes: Sequence[int], number: int, epoch: int, starts: Mapping[int, Start]) -> Feed:
    """A feed that reads in this process, when rows are asked for."""
    readers: dict[int, LaneReader] = {}

    def more(lane: int, count: int) -> dict[int, _Block]:
        skipped = (0, 0.0)
        if lane not in readers:
            readers[lane], skipped = _opened(dataset, lane, number, epoch, starts.get(lane, Start()), shows=True)
        return {lane: _block(readers[lane], count, skipped)}

    feed = Feed(lanes, starts, more)
    for lane in lanes:
        if starts.get(lane, Start()).row:  # at once: rows that are read again may draw random numbers
            feed.open(lane)
    return feed


class LaneBlocks(IterableDataset[bytes]):
    """In each worker: blocks of the rows of its lanes, pass after pass."""

    def __init__(self, dataset: Any, lanes: Sequence[int], number: int, starts: Mapping[int, Start], rows: int) -> None:
        """`rows`: of each lane in a block. `starts`: of the first pass."""
        self.dataset, self.number, self.starts, self.rows = dataset, number, dict(starts), rows
        self.lanes = list(lanes)
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()
        """Set before a pass: persistent workers see nothing else of what happens in the main process."""
        self._passes = 0

    def __iter__(self) -> Iterator[bytes]:
        """One worker's blocks."""
        info = get_worker_info()
        own = self.lanes if info is None else self.lanes[info.id :: info.num_workers]
        starts = self.starts if self._passes == 0 else {}
        self._passes += 1
        epoch = int(self.epoch)
        readers: dict[int, LaneReader] = {}
        live = list(own)
        while live:
            blocks = {}
            for lane in live:
                skipped = (0, 0.0)
                if lane not in readers:
                    start = starts.get(lane, Start())
                    readers[lane], skipped = _opened(self.dataset, lane, self.number, epoch, start, shows=False)
                blocks[lane] = _block(readers[lane], self.rows, skipped)
            live = [lane for lane in live if not blocks[lane].ended]
            yield pickle.dumps(blocks, protocol=pickle.HIGHEST_PROTOCOL)


def worker_feed(loader: DataLoader[bytes], starts: Mapping[int, Start]) -> Feed:
    """A feed from the workers of `loader`, which is over `LaneBlocks`."""
    blocks: LaneBlocks = loader.dataset  # type: ignore[assignment]
    arrived = iter(loader)

    def more(lane: int, count: int) -> dict[int, _Block]:
        found: dict[int, _Block] = pickle.loads(next(arrived))
        return found

    return Feed(blocks.lanes, starts, more)


def say_skipped(feed: Feed, dataset: object) -> None:
    """One line of the rows that a resume read and dropped for want of a state, with the seconds. Local."""
    rows, seconds = feed.skipped
    if rows:
        why = "no state of it was saved" if has_state(dataset) else "it has no state_dict"
        say(
            f"{type(dataset).__name__}: {why}: {rows} rows were read and dropped in {seconds:.1f} s to come to the "
            "place of the checkpoint"
        )
