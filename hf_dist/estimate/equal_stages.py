"""A pipeline of stages with equal numbers of blocks: what a rank holds, how many microbatches it keeps, how long it idles."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hf_dist.pipeline import make_schedule, simulate
from hf_dist.sharding.units import find_unit_modules

__all__ = ["bubble", "in_flight", "of_stage"]


def of_stage(model: nn.Module, pp: int, virtual: int, rank: int) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """(parameters, blocks) of a pipeline rank; None for all."""
    if pp == 1:
        return None, None
    blocks = [path for path, module in find_unit_modules(model).items() if not isinstance(module, nn.Embedding)]
    parts = pp * virtual
    mine = {path for i, path in enumerate(blocks) if i * parts // len(blocks) % pp == rank}
    first, last = blocks[0], blocks[-1]
    inside = [f"{path}." for path in mine]
    outside = [f"{path}." for path in blocks]
    names, before = set(), True
    for name, _ in model.named_parameters():
        if any(name.startswith(prefix) for prefix in outside):
            before = before and not name.startswith(f"{last}.") and not name.startswith(f"{first}.")
            if any(name.startswith(prefix) for prefix in inside):
                names.add(name)
        elif rank == (0 if before else pp - 1):
            names.add(name)
    return frozenset(names), frozenset(mine)


def _schedule(stages: int, microbatches: int, virtual: int) -> Any:
    return make_schedule("1f1b" if virtual == 1 else "interleaved_1f1b", stages, microbatches, virtual)


@functools.cache
def in_flight(stages: int, microbatches: int, virtual: int) -> tuple[int, ...]:
    """By stage, how many microbatches wait for their backward at most."""
    return simulate(_schedule(stages, microbatches, virtual)).in_flight


def bubble(stages: int, microbatches: int, virtual: int) -> float:
    """Bubble of the schedule, as `simulate` finds it for full rounds: share (p - 1) / (v m + p - 1) of the time."""
    return (stages - 1) / (virtual * microbatches + stages - 1)
