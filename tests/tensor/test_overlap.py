"""`tp_overlap_comm`: the sum of an input's gradient begins before weight gradients are computed, with the same bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.tensor.overlapped import order
from tests.tensor.test_properties import BLOCKS, WORLD

HEAD = ["start", "wait"]
MLP = ["dx"] * 2 + ["start"] + ["dW"] * 2 + ["wait"]
ATTENTION = ["dx"] * 3 + ["start"] + ["dW"] * 3 + ["wait"]


@functools.cache
def ran() -> list[dict[Any, Any]]:
    return run_ranks(order, WORLD)


@pytest.mark.parametrize("regions", [False, True])
def test_the_sum_begins_before_the_weight_gradients_and_is_waited_for_behind_them(regions: bool) -> None:
    for rank in ran():
        assert rank[True, regions][0] == HEAD + (MLP + ATTENTION) * BLOCKS
        assert rank[False, regions][0] == HEAD * (1 + 2 * BLOCKS)


@pytest.mark.parametrize("regions", [False, True])
def test_as_many_bytes_travel(regions: bool) -> None:
    for rank in ran():
        assert rank[True, regions][1] == rank[False, regions][1]
        assert sum(rank[True, regions][1].values()) > 0
