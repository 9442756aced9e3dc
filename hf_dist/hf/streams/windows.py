"""The rows of a rank, window by window, in the global order: `Lanes` read by their owners, by one rank for all, or by all.

A window is what one optimizer step has: `microbatches` of all data ranks. While no lane ends, a rank takes the rows of its own
lanes and the ranks compare one number. Once a lane has ended, the order no longer gives each rank a row in turn of its own: the
ranks tell each other what their lanes have left and hand the rows over, until the epoch ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hf_dist.hf.streams.feed import Feed
from hf_dist.hf.streams.lanes import Place, parts_of_window

__all__ = ["DataRanks", "Reads", "Shape", "Window", "next_window"]


class Reads(Enum):
    """Who reads the lanes."""

    OWNERS = "each data rank its own lanes"
    FIRST = "data rank 0 all lanes, for all ranks"
    ALL = "each data rank all lanes, and takes its rows"


class DataRanks(Protocol):
    """The ranks that have different rows, to talk about them. Each call is collective over them."""

    rank: int
    size: int

    def any(self, value: bool) -> bool:
        """Whether it is true on a rank."""

    def exchange(self, value: Any) -> list[Any]:
        """The value of each rank."""


@dataclass(frozen=True)
class Shape:
    """Of a window."""

    microbatches: int
    rows: int
    """Of a microbatch on one rank."""
    fills: bool
    """Whether a short window has all of its microbatches (`parts_of_window`)."""
    drops: bool = False
    """Whether rows that make no whole microbatch of all ranks are left out."""


@dataclass(frozen=True)
class Window:
    """This rank's rows."""

    batches: list[list[Any]]
    """By microbatch. Empty at the end of an epoch."""
    is_spare: list[bool]
    """By microbatch: whether its only row is another's, because fewer rows than ranks were left."""
    places: list[Place]
    """Behind each microbatch of all ranks."""


def next_window(place: Place, feed: Feed, ranks: DataRanks, reads: Reads, shape: Shape) -> Window:
    """The window at `place`. Collective over `ranks`, unless each reads all lanes."""
    wanted = shape.microbatches * shape.rows * ranks.size
    if reads is Reads.OWNERS and ranks.size > 1:
        own = _own_rows(place, feed, ranks, wanted)
        if own is not None:
            lanes, rows = own
            size = shape.rows
            batches = [rows[first : first + size] for first in range(0, len(rows), size)]
            return Window(batches, [False] * len(batches), _places(place, lanes, size * ranks.size))
        lanes, rows, place = _handed_over(place, feed, ranks, wanted)
    elif reads is Reads.FIRST and ranks.size > 1:
        found = _read_here(place, feed, wanted) if ranks.rank == 0 else None
        lanes, rows, place = ranks.exchange(found)[0]
    else:
        lanes, rows, place = _read_here(place, feed, wanted)
    return _dealt(place, lanes, rows, ranks, shape)


def _places(place: Place, lanes: Sequence[int], whole: int) -> list[Place]:
    found = []
    for first in range(0, len(lanes), whole):
        place = place.after(lanes[first : first + whole])
        found.append(place)
    return found


def _own_rows(place: Place, feed: Feed, ranks: DataRanks, wanted: int) -> tuple[list[int], list[Any]] | None:
    """The lanes of the window's rows and this rank's rows; None on all ranks if a lane ends before its last row."""
    if not place.in_step:
        return None
    lanes = place.next_lanes(wanted)
    counts = Counter(lanes)
    short = any(feed.available(lane, counts[lane]) < counts[lane] for lane in feed.lanes)
    if ranks.any(short):
        return None
    own = set(feed.lanes)
    return lanes, [feed.take(lane) for lane in lanes if lane in own]


def _handed_over(place: Place, feed: Feed, ranks: DataRanks, wanted: int) -> tuple[list[int], list[Any], Place]:
    """All rows of the window, on every rank."""
    left = {lane: feed.available(lane, wanted) for lane in feed.lanes}
    ends = {lane: place.rows[lane] + count for lane, count in left.items() if count < wanted}
    everywhere: dict[int, int] = {}
    for of_rank in ranks.exchange(ends):
        everywhere |= of_rank
    place = place.ending(everywhere)
    lanes = place.next_lanes(wanted)
    own = {lane: [feed.take(lane) for _ in range(lanes.count(lane))] for lane in feed.lanes}
    rows_of: dict[int, list[Any]] = {}
    for of_rank in ranks.exchange(own):
        rows_of |= of_rank
    given = {lane: iter(rows) for lane, rows in rows_of.items()}
    return lanes, [next(given[lane]) for lane in lanes], place


def _read_here(place: Place, feed: Feed, wanted: int) -> tuple[list[int], list[Any], Place]:
    """All rows of the window, from lanes that this rank reads."""
    ends: dict[int, int] = {}
    if place.in_step:  # the usual case at once
        lanes = place.next_lanes(wanted)
        if all(feed.available(lane, count) == count for lane, count in Counter(lanes).items()):
            return lanes, [feed.take(lane) for lane in lanes], place
    for lane in feed.lanes:
        left = feed.available(lane, wanted)
        if left < wanted:
            ends[lane] = place.rows[lane] + left
    place = place.ending(ends)
    lanes = place.next_lanes(wanted)
    return lanes, [feed.take(lane) for lane in lanes], place


def _dealt(place: Place, lanes: Sequence[int], rows: Sequence[Any], ranks: DataRanks, shape: Shape) -> Window:
    """This rank's part of all rows: of each microbatch every D-th."""
    whole = shape.rows * ranks.size
    kept = len(rows) - len(rows) % whole if shape.drops else len(rows)
    window = Window([], [], [])
    for part in parts_of_window(kept, shape.microbatches, whole, fills=shape.fills):
        own = [rows[index] for index in part[ranks.rank :: ranks.size]]
        window.batches.append(own or [rows[0]])
        window.is_spare.append(not own)
        place = place.after([lanes[index] for index in part])
        window.places.append(place)
    return window
