"""Which positions a rank has: every position once, in order where there is no ring; and which layouts fit which heads."""

from __future__ import annotations

import pytest
import torch

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.parallel.sequence.layout import SequenceLayout, layout_for

LAYOUTS = [
    SequenceLayout(1, 2, "ring"),
    SequenceLayout(2),
    SequenceLayout(1, 3),
    SequenceLayout(2, 2, "ring"),
    SequenceLayout(2, 3),
    SequenceLayout(1, 4, "ring"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=SequenceLayout.describe)
@pytest.mark.parametrize("length", [1, 7, 48, 61])
def test_every_position_is_on_one_rank(layout: SequenceLayout, length: int) -> None:
    padded = layout.padded(length)
    assert length <= padded < length + layout.multiple
    parts = [layout.positions(rank, padded) for rank in range(layout.size)]
    assert {len(part) for part in parts} == {padded // layout.size}
    joined = torch.cat(parts)
    undo = layout.undo(padded)
    assert torch.equal(joined if undo is None else joined[undo], torch.arange(padded))


def test_a_ring_deals_from_both_ends() -> None:
    """Causal attention then is the same work on every rank: the first and the last chunk, the second and the one before."""
    layout = SequenceLayout(1, 2, "ring")
    assert layout.positions(0, 8).tolist() == [0, 1, 6, 7]
    assert layout.positions(1, 8).tolist() == [2, 3, 4, 5]
    seen = [int((layout.positions(rank, 64) + 1).sum()) for rank in range(2)]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("size", "heads", "wanted", "expected"),
    [
        (4, 8, "auto", "ulysses 4"),
        (4, 6, "auto", "ulysses 2 x gather 2"),
        (3, 4, "auto", "gather 3"),
        (4, 8, "gather", "gather 4"),
        (4, 7, "ring", "ring 4"),
        (4, 8, (2, 2), "ulysses 2 x ring 2"),
        (4, 6, "ulysses", None),
        (4, 8, (2, 3), None),
        (8, 6, (4, 2), None),
    ],
)
def test_layouts_follow_the_heads(size: int, heads: int, wanted: str | tuple[int, int], expected: str | None) -> None:
    layout = layout_for(size, heads, wanted)
    assert (None if layout is None else layout.describe()) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ulises", 'Did you mean "ulysses"'),
        ([2], "is not two numbers"),
        ([2, 0], "hf_dist.sequence_parallel"),
        (3, "hf_dist.sequence_parallel"),
    ],
)
def test_slips_in_the_key_are_told(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"sequence_parallel_size": 2, "hf_dist": {"sequence_parallel": value}})
    assert message in str(error.value)


def test_the_key_of_deepspeed_is_read() -> None:
    config = load_config({"sequence_parallel_size": 4, "hf_dist": {"sequence_parallel": [2, 2]}})
    assert (config.sequence_parallel_size, config.hf_dist.sequence_parallel) == (4, (2, 2))
    assert load_config({}).sequence_parallel_size == 1
    with pytest.raises(ConfigError, match="sequence_parallel_size"):
        load_config({"sequence_parallel_size": 0})
