"""The flat layout, for any shapes and any number of ranks."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hf_dist.sharding.layout import ALIGNMENT, FlatLayout

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
worlds = st.integers(1, 9)


def pack(sizes: list[tuple[int, ...]], world: int) -> FlatLayout:
    """Parameters named by their position."""
    return FlatLayout.pack([(f"p{i}", shape) for i, shape in enumerate(sizes)], world)


@given(shapes, worlds)
def test_fragments_of_all_ranks_tile_every_slot(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = pack(sizes, world)
    for slot, shape in zip(layout.slots, sizes, strict=True):
        assert slot.numel == math.prod(shape) and slot.stop == slot.offset + slot.numel
        pieces = [layout.fragment(slot, rank) for rank in range(world)]
        covered = [i for start, stop in pieces for i in range(start, stop)]
        assert covered == list(range(slot.numel))
        for rank, (start, stop) in enumerate(pieces):
            first, last = layout.shard(rank)
            assert start == stop or first <= slot.offset + start < slot.offset + stop <= last


@given(shapes, worlds)
def test_shards_tile_the_buffer_and_everything_is_aligned(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = pack(sizes, world)
    edges = [layout.shard(rank) for rank in range(world)]
    assert edges[0][0] == 0 and edges[-1][1] == layout.numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert all(start % ALIGNMENT == 0 for start, _ in edges)
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)


@given(shapes, worlds)
def test_slots_and_gaps_tile_the_buffer(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = pack(sizes, world)
    pieces = sorted([(s.offset, s.stop) for s in layout.slots if s.numel] + list(layout.gaps()))
    assert all(start < stop for start, stop in pieces)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    if pieces:
        assert pieces[0][0] == 0 and pieces[-1][1] == layout.numel
    else:
        assert layout.numel == 0


@given(shapes, worlds)
def test_padding_is_less_than_the_alignment_per_slot_and_rank(sizes: list[tuple[int, ...]], world: int) -> None:
    layout = pack(sizes, world)
    assert layout.num_params == sum(math.prod(s) for s in sizes)
    assert 0 <= layout.numel - layout.num_params <= (ALIGNMENT - 1) * (len(sizes) + world)


@given(shapes, worlds)
def test_the_place_of_a_parameter_does_not_depend_on_the_number_of_ranks(
    sizes: list[tuple[int, ...]], world: int
) -> None:
    assert pack(sizes, world).slots == pack(sizes, 1).slots


def test_a_parameter_without_dimensions_has_one_element() -> None:
    layout = pack([(), (0,), (2, 0)], 2)
    assert [slot.numel for slot in layout.slots] == [1, 0, 0]
    assert layout.fragment(layout.slots[0], 0) == (0, 1)
    assert layout.fragment(layout.slots[0], 1) == (1, 1)
