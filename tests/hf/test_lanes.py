"""The lanes of a stream: one order of all rows, whatever number of ranks shares them; no data and no processes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.errors import ConfigError
from hf_dist.hf.streams.lanes import Lanes, Place, parts_of_window

lanes_and_ranks = st.integers(1, 12).flatmap(
    lambda ranks: st.tuples(st.integers(1, 6).map(lambda times: Lanes(times * ranks)), st.just(ranks))
)


@given(lanes_and_ranks)
def test_each_lane_has_one_owner(case: tuple[Lanes, int]) -> None:
    lanes, ranks = case
    owned = [lanes.owned(rank, ranks) for rank in range(ranks)]
    assert sorted(itertools.chain(*owned)) == list(range(lanes.number))
    assert len({len(own) for own in owned}) == 1
    assert all(lanes.owner(lane, ranks) == rank for rank, own in enumerate(owned) for lane in own)


@given(lanes_and_ranks, st.integers(0, 40))
def test_a_rank_has_each_d_th_row_until_a_lane_ends(case: tuple[Lanes, int], done: int) -> None:
    lanes, ranks = case
    place = Place.start(lanes)
    place = place.after(place.next_lanes(done * ranks))
    order = place.next_lanes(4 * lanes.number)
    for rank in range(ranks):
        assert {lanes.owner(lane, ranks) for lane in order[rank::ranks]} == {rank}


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_the_order_is_by_row_and_then_by_lane_wherever_it_is_begun(lengths: list[int], data: st.DataObject) -> None:
    place = Place((0,) * len(lengths), tuple(lengths))
    order = place.next_lanes(sum(lengths) + 1)
    seen: dict[int, int] = {}
    rows = [(seen.update({lane: seen.get(lane, -1) + 1}) or seen[lane], lane) for lane in order]
    assert rows == sorted((row, lane) for lane, length in enumerate(lengths) for row in range(length))
    cut = data.draw(st.integers(0, len(order)))
    assert place.after(order[:cut]).next_lanes(len(order)) == order[cut:]
    known = place.after(order[:cut])
    unknown = Place(known.rows, (None,) * len(lengths)).ending(dict(enumerate(lengths)))
    assert unknown == known


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_a_window_has_each_row_once_and_a_short_one_all_of_its_microbatches(
    rows: int, microbatches: int, whole: int, fills: bool
) -> None:
    rows = min(rows, microbatches * whole)
    parts = parts_of_window(rows, microbatches, whole, fills=fills)
    assert list(itertools.chain(*parts)) == list(range(rows))
    assert all(len(part) <= whole for part in parts)
    if fills:
        assert len(parts) == (microbatches if rows else 0)
    else:
        assert len(parts) == -(-rows // whole)


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 40))
def test_a_run_begins_with_lanes_that_its_ranks_can_share(ranks: int, workers: int, shards: int) -> None:
    lanes = Lanes.first(ranks, workers, shards)
    assert 1 <= lanes.number <= shards
    assert lanes.number == 1 or lanes.number % ranks == 0
    if shards >= ranks * max(workers, 1):
        assert lanes.number == ranks * max(workers, 1)


def test_a_number_of_ranks_that_cannot_share_the_lanes_is_refused_with_those_that_can() -> None:
    for ranks in (1, 2, 3, 4, 6, 12):
        Lanes(12).refuse(ranks)
    with pytest.raises(ConfigError, match=r"12 lanes.*5 data ranks.*Use 1, 2, 3, 4, 6 or 12 data ranks"):
        Lanes(12).refuse(5)
    with pytest.raises(ConfigError, match="Use 1 or 7 data ranks"):
        Lanes(7).refuse(14)
