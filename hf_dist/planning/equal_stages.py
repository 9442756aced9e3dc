"""A pipeline of stages with equal numbers of blocks: what a rank holds, how many microbatches it keeps, how long it idles."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from torch import nn

from hf_dist.parallel.pipeline import Schedule, make_schedule
from hf_dist.planning.pipeline_rank import PipelineRank, PlannedStage, flying, transfers
from hf_dist.sharding.units import find_unit_modules

__all__ = ["bubble", "equal_rank"]


def equal_rank(model: nn.Module, pp: int, virtual: int, rank: int, microbatches: int) -> PipelineRank:
    """Rank `rank` of such a pipeline; with one stage per rank under 1F1B."""
    if pp == 1:
        return PipelineRank()
    blocks = [path for path, module in find_unit_modules(model).items() if not isinstance(module, nn.Embedding)]
    parts = pp * virtual
    stage_of = {path: i * parts // len(blocks) for i, path in enumerate(blocks)}
    inside = [f"{path}." for path, stage in stage_of.items() if stage % pp == rank]
    counts = flying(_schedule(pp, min(microbatches, 4 * pp), virtual), rank)  # more change nothing
    stages = tuple(
        PlannedStage(frozenset(path for path in blocks if stage_of[path] == stage), count)
        for stage, count in zip(range(rank, parts, pp), counts, strict=True)
    )
    names = frozenset(_names(model, blocks, inside, is_first=rank == 0, is_last=rank == pp - 1))
    arriving = transfers(rank, pp, counts, microbatches)
    return PipelineRank(rank, names, stages, is_last=rank == pp - 1, transfers=arriving)


def _names(
    model: nn.Module, blocks: Sequence[str], inside: Sequence[str], *, is_first: bool, is_last: bool
) -> Iterator[str]:
    """Parameters of the blocks `inside`, and of what stands before and behind all blocks."""
    ends = (f"{blocks[0]}.", f"{blocks[-1]}.")
    outside, before = [f"{path}." for path in blocks], True
    for name, _ in model.named_parameters():
        if any(name.startswith(prefix) for prefix in outside):
            before = before and not name.startswith(ends)
            if any(name.startswith(prefix) for prefix in inside):
                yield name
        elif is_first if before else is_last:
            yield name


@functools.cache
def _schedule(stages: int, microbatches: int, virtual: int) -> Schedule:
    return make_schedule("1f1b" if virtual == 1 else "interleaved_1f1b", stages, microbatches, virtual)


def bubble(stages: int, microbatches: int, virtual: int) -> float:
    """Bubble of the schedule, as `simulate` finds it for full rounds: share (p - 1) / (v m + p - 1) of the time."""
    return (stages - 1) / (virtual * microbatches + stages - 1)
