"""Partitions against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.errors import TopologyError
from hf_dist.parallel.pipeline.partition import BlockCosts, balance, partition, uniform

COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


def every_split(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield (0, *cuts, num_blocks)


def stage_costs(bounds: tuple[int, ...], blocks: list[float], first: float, last: float) -> list[float]:
    costs = [sum(blocks[a:b]) for a, b in itertools.pairwise(bounds)]
    costs[0] += first
    costs[-1] += last
    return costs


@settings(max_examples=300, deadline=None)
@given(COSTS, st.data(), st.integers(0, 30).map(float), st.integers(0, 60).map(float))
def test_balance_is_the_best_of_all_splits(blocks: list[float], data: st.DataObject, first: float, last: float) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))

    def key(bounds: tuple[int, ...]) -> tuple[float, float]:
        costs = stage_costs(bounds, blocks, first, last)
        return max(costs), sum(c * c for c in costs)

    best = min(map(key, every_split(len(blocks), num_stages)))
    found = balance(blocks, num_stages, first, last)
    assert found in set(every_split(len(blocks), num_stages))
    assert key(found) == pytest.approx(best)


@given(st.integers(1, 40), st.data())
def test_uniform_sizes_differ_by_at_most_one(num_blocks: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_blocks))
    sizes = [b - a for a, b in itertools.pairwise(uniform(num_blocks, num_stages))]
    assert sum(sizes) == num_blocks and len(sizes) == num_stages and max(sizes) - min(sizes) <= 1


def test_a_heavy_head_shortens_the_last_stage() -> None:
    # llama-3.2-1B: 16 blocks, a head worth 3.4 of them
    found = partition(BlockCosts(blocks=(1.0,) * 16, last=3.4), 4)
    assert [b - a for a, b in itertools.pairwise(found.bounds)] == [5, 5, 5, 1]
    assert found.efficiency == pytest.approx(19.4 / (4 * 5))


def test_every_method_of_the_config() -> None:
    costs = BlockCosts(
        blocks=(1.0, 1.0, 1.0, 3.0), params=(10, 10, 70, 10), first_params=5, last_params=5,
        classes=("Mamba", "Attention", "Mamba", "Attention"),
    )  # fmt: skip
    assert partition(costs, 2, "cost").bounds == (0, 3, 4)
    assert partition(costs, 2, "parameters").bounds == (0, 2, 4)
    assert partition(costs, 2, "uniform").bounds == (0, 2, 4)
    assert partition(costs, 2, "type:attention").bounds in {(0, 2, 4), (0, 3, 4)}
    assert partition(costs, 2, [1, 3]).bounds == (0, 1, 4)


@pytest.mark.parametrize(
    ("num_stages", "method", "message"),
    [
        (5, "cost", "5 stages, but the model has 4 blocks"),
        (2, [4, 1], r"\[4, 1\] must be 2 numbers of blocks, .* add up to the model's 4; \[2, 2\] would be equal"),
        (2, [4, 0], "each at least 1"),
        (2, "fast", "'fast' is not"),
        (3, "type:Mamba", r"matches 2 of the blocks \(Attention, Mamba\), fewer than the 3 stages"),
    ],
)
def test_what_cannot_be_done_names_the_key_and_the_way_out(num_stages: int, method: str, message: str) -> None:
    costs = BlockCosts((1.0,) * 4, classes=("Mamba", "Attention") * 2)
    with pytest.raises(TopologyError, match=message) as error:
        partition(costs, num_stages, method)
    assert str(error.value).startswith("pipeline.")
