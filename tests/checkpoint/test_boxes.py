"""Intervals as boxes: every element once, in order, few boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint.boxes import boxes
from hf_dist.checkpoint.flat_slice import FlatSlice

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=400, deadline=None)
@given(shapes, st.data())
def test_boxes_cover_the_interval_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = list(boxes(start, stop, shape))
    tensor = torch.arange(numel).view(shape)
    position = start
    for box in found:
        part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert box.start == position
        assert part.reshape(-1).tolist() == list(range(position, position + box.numel))
        position += box.numel
    assert position == max(start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_slice_gives_views_of_its_values() -> None:
    values = torch.zeros(16)
    piece = FlatSlice(values, start=5, shape=(6, 4))
    for item in piece.__create_write_items__("w", piece):
        piece.__get_tensor_shard__(item.index).fill_(1.0)
    assert values.tolist() == [1.0] * 16


def test_a_scalar_parameter_is_one_box() -> None:
    piece = FlatSlice(torch.tensor([3.0]), start=0, shape=())
    (item,) = piece.__create_write_items__("w", piece)
    assert piece.__get_tensor_shard__(item.index).shape == ()
