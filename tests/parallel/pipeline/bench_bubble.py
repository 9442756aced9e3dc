"""Measured idle time of real processes that sleep instead of computing, against the formulas.

    python -m tests.parallel.pipeline.bench_bubble

A benchmark, not a test: on a busy machine sleeps take longer than they say.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from hf_dist.dist.groups import GroupLease, GroupMaker
from hf_dist.parallel.pipeline import (
    P2PTransport,
    ScheduleRun,
    StagedModel,
    add_communication,
    make_channels,
    make_plan,
    make_schedule,
    partition,
    probe,
)
from tests.harness import run_ranks
from tests.parallel.pipeline.test_schedule import bubble

RANKS, MICROBATCHES, STEPS = 4, 8, 2
SECONDS = 0.6  # of one F, I or W of a whole rank
CASES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)]


class Weight(torch.autograd.Function):
    """Multiplies, and sleeps while it computes the gradient of the weight or of the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Called once for both in B, once for each in I and W.
        wanted = torch._C._will_engine_execute_node
        time.sleep(ctx.seconds * sum(wanted(node) for node, _ in ctx.next_functions if node is not None))
        return grad, grad.sum((0, 1)), None


class Block(torch.nn.Module):
    """One stage."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.part = torch.nn.Identity()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Weight.apply(x, self.weight, 0.0 if x.is_meta else self.seconds)


class Net(torch.nn.Module):
    """Blocks in a row; a weight in front gives stage 0 an input gradient to compute."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.front = torch.nn.Embedding(4, 8)
        self.blocks = torch.nn.ModuleList([Block(SECONDS * RANKS / stages) for _ in range(stages)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.front(ids)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def worker(rank: int, world: int) -> list[list[tuple[float, float]]]:
    """Per case and step: when this rank began and ended."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    maker = GroupMaker(rank, "gloo", timedelta(seconds=60), GroupLease("none"), torch.device("cpu"))
    channels = make_channels([list(range(world))], ring=True, rank=rank, group_of=maker.one_of)
    ids = torch.zeros(2, 3, dtype=torch.long)
    times = []
    for name, virtual in CASES:
        net = Net(world * virtual)
        found = probe(net, {"ids": ids})
        plan = make_plan(found, partition(found.costs(), world * virtual, "uniform").bounds)
        schedule = add_communication(make_schedule(name, world, MICROBATCHES, virtual))
        staged = StagedModel(net, plan, schedule.stages_of(rank))
        transport = P2PTransport(channels, torch.device("cpu"))
        spans = []
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            ScheduleRun(staged, schedule, rank, transport).run([{"ids": ids}] * MICROBATCHES, lambda m, b: m(**b))
            spans.append((start, time.perf_counter()))
        times.append(spans)
    return times


def main() -> None:
    """Print measured and predicted idle shares; run it on a machine that does nothing else."""
    by_rank = run_ranks(worker, RANKS)
    busy = 3 * MICROBATCHES * SECONDS
    for index, (name, virtual) in enumerate(CASES):
        steps = [
            max(rank[index][step][1] for rank in by_rank) - min(rank[index][step][0] for rank in by_rank)
            for step in range(STEPS)
        ]
        # The shortest of the steps: a shared machine only ever lengthens one.
        measured = 1 - busy / min(steps)
        print(f"{name:16} measured {measured:.3f}  formula {bubble(name, RANKS, MICROBATCHES, virtual):.3f}")


if __name__ == "__main__":
    main()
