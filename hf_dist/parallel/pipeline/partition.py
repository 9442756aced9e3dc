"""Assigns blocks to stages as contiguous ranges, optimal for the given costs. Pure arithmetic.

A partition of N blocks into S stages is `bounds`, S + 1 ascending numbers from 0 to N; stage s has blocks bounds[s] up to
bounds[s+1]. Modules before the first block (embeddings) belong to stage 0, modules after the last (norm, head) to the last
stage; their costs are `first` and `last`. The number of ranks does not matter here: S = P * V when interleaved.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.errors import TopologyError

__all__ = ["BlockCosts", "Partition", "balance", "partition", "uniform"]


@dataclass(frozen=True)
class BlockCosts:
    """Input of a partition. `blocks`, `first` and `last` share any one unit."""

    blocks: tuple[float, ...]
    """Time of every block, in execution order."""
    first: float = 0.0
    """Time of the modules before the first block."""
    last: float = 0.0
    """Time of the modules after the last block: norm, LM head, loss."""
    params: tuple[int, ...] = ()
    """Number of parameters of every block."""
    first_params: int = 0
    """Parameters before the first block."""
    last_params: int = 0
    """Parameters after the last block."""
    classes: tuple[str, ...] = ()
    """Class name of every block."""


@dataclass(frozen=True)
class Partition:
    """Bounds of the stages, and the stages' costs."""

    bounds: tuple[int, ...]
    costs: tuple[float, ...]
    """Cost of each stage, in the unit of the input costs."""

    @property
    def efficiency(self) -> float:
        """Mean over maximum of the stages' costs: the share of time in which a busy pipeline computes."""
        return sum(self.costs) / (len(self.costs) * max(self.costs)) if max(self.costs) else 1.0


def partition(costs: BlockCosts, num_stages: int, method: str | Sequence[int] = "cost") -> Partition:
    """Split by `method` (`pipeline.partition_method`).

    "cost": minimise the largest time of a stage, including embedding and head; "parameters": the same for parameters;
    "uniform": equal numbers of blocks; "type:REGEX": equal numbers of blocks whose class name matches (ignoring case), as in
    DeepSpeed; a list: blocks per stage. Raises `TopologyError` for fewer blocks than stages, or a list that does not add up.
    """
    num_blocks = len(costs.blocks)
    if num_stages > num_blocks:
        raise TopologyError(
            f"pipeline.stages: {num_stages} stages, but the model has {num_blocks} blocks to share out; use at most "
            f"{num_blocks} (stages times virtual_stages)"
        )
    if not isinstance(method, str):
        bounds = _explicit(method, num_stages, num_blocks)
    elif method == "cost":
        bounds = balance(costs.blocks, num_stages, costs.first, costs.last)
    elif method == "parameters":
        bounds = balance(costs.params, num_stages, costs.first_params, costs.last_params)
    elif method == "uniform":
        bounds = uniform(num_blocks, num_stages)
    elif method.startswith("type:"):
        bounds = _by_type(costs.classes, num_stages, method.removeprefix("type:"))
    else:
        raise TopologyError(
            f'pipeline.partition_method: {method!r} is not "cost", "uniform", "parameters", "type:REGEX" or a list'
        )
    return Partition(bounds, _stage_costs(bounds, costs.blocks, costs.first, costs.last))


def uniform(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Bounds of stages whose sizes differ by at most one, larger ones first (the last stage also holds the head)."""
    size, longer = divmod(num_blocks, num_stages)
    return tuple(s * size + min(s, longer) for s in range(num_stages + 1))


def balance(blocks: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Bounds of the contiguous split with the smallest maximum cost and, among those, the smallest sum of squares.

    Exact, O(N^2 S). Every stage gets at least one block. `first` is added to stage 0, `last` to the last stage.
    """
    count = len(blocks)
    prefix = [0.0, *itertools.accumulate(blocks)]

    def cost(start: int, stop: int, stage: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + ends

    def solve(limit: float) -> tuple[float, float, tuple[int, ...]]:
        """Smallest (maximum, sum of squares, bounds) over splits whose stages cost at most `limit`.

        The maximum alone has optimal substructure, and so does the sum of squares under a fixed limit, but not both together.
        Hence two passes: one without a limit minimises the maximum; one with that limit minimises the squares.
        """
        # best[n]: best split of the first n blocks into the stages so far
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
        for stage in range(num_stages):
            after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            for stop in range(stage + 1, count - (num_stages - stage - 1) + 1):
                options = []
                for start, (top, squares, bounds) in best.items():
                    if start < stop and (c := cost(start, stop, stage)) <= limit:
                        key = max(top, c) if limit == float("inf") else 0.0
                        options.append((key, squares + c * c, (*bounds, stop)))
                if options:
                    after[stop] = min(options)
            best = after
        return best[count]

    smallest = solve(float("inf"))[0]
    return solve(smallest * (1 + 1e-12))[2]


def _by_type(classes: Sequence[str], num_stages: int, pattern: str) -> tuple[int, ...]:
    matches = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in classes]
    if sum(matches) < num_stages:
        raise TopologyError(
            f"pipeline.partition_method: type:{pattern} matches {int(sum(matches))} of the blocks "
            f"({', '.join(sorted(set(classes)))}), fewer than the {num_stages} stages"
        )
    return balance(matches, num_stages)


def _explicit(sizes: Sequence[int], num_stages: int, num_blocks: int) -> tuple[int, ...]:
    if len(sizes) != num_stages or sum(sizes) != num_blocks or any(size < 1 for size in sizes):
        raise TopologyError(
            f"pipeline.partition_method: {list(sizes)} must be {num_stages} numbers of blocks, each at least 1, that add up "
            f"to the model's {num_blocks}; [{', '.join(map(str, _sizes(uniform(num_blocks, num_stages))))}] would be equal"
        )
    return (0, *itertools.accumulate(sizes))


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _stage_costs(bounds: Sequence[int], blocks: Sequence[float], first: float, last: float) -> tuple[float, ...]:
    costs = [sum(blocks[start:stop]) for start, stop in itertools.pairwise(bounds)]
    costs[0] += first
    costs[-1] += last
    return tuple(costs)
