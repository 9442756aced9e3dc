"""`tp_overlap_comm`: the sum of an input's gradient begins before weight gradients are computed, with the same bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.parallel.pipeline.backward import StageGraph
from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.peers import Started
from tests.harness import run_ranks
from tests.parallel.tensor.overlapped import order
from tests.parallel.tensor.test_properties import BLOCKS, WORLD

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


def test_under_autocast_the_losses_are_those_of_a_sum_behind_the_weight_gradients() -> None:
    for rank in ran():
        assert rank[True] == pytest.approx(rank[False], rel=1e-5)


class _Alone:
    """A split between one rank, which counts its sums."""

    size, rank, sums = 1, 0, 0

    def start_sum(self, tensor: torch.Tensor) -> Started:
        self.sums += 1
        return Started(tensor.clone(), lambda: None)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_split_backward_defers_the_weight_gradients_and_sums_once(is_leaf: bool) -> None:
    """`is_leaf`: the crossing comes first in its stage."""
    torch.manual_seed(0)
    first, *products = (nn.Linear(4, 4) for _ in range(3))
    received, peers = torch.randn(2, 3, 4, requires_grad=True), _Alone()
    found: list[list[torch.Tensor]] = []
    for early in (False, True):
        x = received.view_as(received) if is_leaf else first(received)
        crossed = tp_collectives.to_replicated_early(x, peers, products) if early else None  # type: ignore[arg-type]
        out = sum(p(crossed.entering(p) if crossed else x).tanh() for p in products)
        graph = StageGraph([received], [out])
        graph.backward_input([torch.ones(2, 3, 4)])
        assert [p.weight.grad for p in products] == [None, None]
        graph.backward_weight()
        weights = [received, *(w for p in products for w in p.parameters())]
        found.append([w.grad.clone() for w in weights if w.grad is not None])
        for w in (*weights, *first.parameters()):
            w.grad = None
    assert peers.sums == 1
    assert len(found[0]) == 5
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain)
