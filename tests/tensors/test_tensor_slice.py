"""Slices and intervals as boxes: every element once, in order, few boxes; pieces of files seen through a slice."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.pieces import Piece
from hf_dist.tensors.tensor_slice import TensorSlice

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def slices(draw: st.DrawFn) -> TensorSlice:
    """One or two ranges of every dimension, in any order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    ranges = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
        pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
        ranges.append(tuple(draw(st.permutations(pairs))))
    return TensorSlice(tuple(shape), tuple(ranges))


def interval_of(numel: int, data: st.DataObject) -> tuple[int, int]:
    start = data.draw(st.integers(0, numel))
    return start, data.draw(st.integers(start, numel))


@settings(max_examples=400, deadline=None)
@given(shapes, st.data())
def test_boxes_cover_the_interval_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, stop = interval_of(math.prod(shape), data)
    found = list(TensorSlice.all(shape).boxes(start, stop))
    tensor = torch.arange(math.prod(shape)).view(shape)
    position = start
    for box in found:
        assert box.start == position
        assert box.span == box.numel
        assert tensor[box.index].reshape(-1).tolist() == list(range(position, position + box.numel))
        position += box.numel
    assert position == max(start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=400, deadline=None)
@given(slices(), st.data())
def test_a_slice_is_what_indexing_gives_and_its_boxes_are_its_intervals(held: TensorSlice, data: st.DataObject) -> None:
    whole = torch.arange(held.whole_numel).view(held.whole)
    kept = whole
    for dim, ranges in enumerate(held.ranges):
        kept = kept.index_select(dim, torch.tensor([i for a, b in ranges for i in range(a, b)], dtype=torch.int64))
    assert kept.shape == held.shape
    assert torch.equal(held.take(whole), kept)
    back = torch.zeros_like(whole)
    held.put(torch.cat([torch.zeros(3, dtype=kept.dtype), kept.reshape(-1)])[3:].view(held.shape), back)  # a view
    assert torch.equal(held.take(back), kept)
    assert [held.in_whole(i) for i in range(held.numel)] == kept.reshape(-1).tolist()
    start, stop = interval_of(held.numel, data)
    found = torch.full((stop - start,), -1)
    for box in held.boxes(start, stop):
        part = found[box.start - start :][: box.span].as_strided(box.sizes, box.strides)
        assert (part == -1).all()
        part.copy_(whole[box.index])
    assert torch.equal(found, kept.reshape(-1)[start:stop])


@settings(max_examples=400, deadline=None)
@given(slices(), st.data())
def test_runs_of_a_slice_put_each_of_its_elements_where_the_file_has_it(held: TensorSlice, data: st.DataObject) -> None:
    turned = data.draw(st.booleans()) and len(held.whole) > 1
    whole = torch.arange(held.whole_numel).view(held.whole)
    stored = whole.transpose(0, 1).contiguous() if turned else whole  # as a file has it
    view = stored.transpose(0, 1) if turned else stored
    piece = Piece("", held.whole, 0, whole.stride(), 0, view.stride()).merged()
    start, stop = interval_of(held.numel, data)
    found = torch.full((stop - start,), -1)
    targets = []
    for run in piece.runs(start, stop, held):
        assert start <= run.source < run.source + run.numel <= stop
        found[run.source - start :][: run.numel] = stored.reshape(-1)[run.target : run.target + run.numel]
        targets.append(run.target)
    assert targets == sorted(targets)
    assert torch.equal(found, held.take(whole).reshape(-1)[start:stop])


def test_columns_in_several_ranges_are_neighbours_only_within_a_row() -> None:
    held = TensorSlice.along((4, 6), -1, (0, 1), (3, 5))
    assert held.shape == (4, 3)
    runs = [(r.source, r.target, r.numel) for r in Piece.whole("", 24).runs(0, 6, held)]
    assert runs == [(0, 0, 1), (1, 3, 2), (3, 6, 1), (4, 9, 2)]


def test_a_slice_gives_views_of_its_values() -> None:
    for held in (TensorSlice.all((6, 4)), TensorSlice.along((6, 10), 1, (1, 3), (7, 9))):
        values = torch.zeros(16)
        piece = FlatSlice(values, start=5, held=held)
        for item in piece.__create_write_items__("w", piece):
            piece.__get_tensor_shard__(item.index).add_(1.0)
        assert values.tolist() == [1.0] * 16


def test_a_slice_is_filled_from_a_whole_tensor() -> None:
    held = TensorSlice.along((6, 10), 1, (1, 3), (7, 9))
    whole = torch.arange(60.0).view(6, 10)
    values = torch.zeros(16)
    FlatSlice(values, 5, held).fill(whole)
    assert torch.equal(values, held.take(whole).reshape(-1)[5:21])


def test_a_scalar_parameter_is_one_box() -> None:
    piece = FlatSlice(torch.tensor([3.0]), start=0, held=())
    (item,) = piece.__create_write_items__("w", piece)
    assert piece.__get_tensor_shard__(item.index).shape == ()
