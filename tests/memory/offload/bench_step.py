"""The optimizer step on the host with bf16 weights written back, against the peers' kernels. Rounds are mixed.

    python -m tests.memory.offload.bench_step [--threads 1 2] [--rounds 7] [--million 50]

DeepSpeed's kernel is measured where `deepspeed` can be imported. GB/s: 28 bytes per element for the step (reads weight,
gradient, two states; writes three of them) and 6 for the write-back. Memory bandwidth: STREAM's triad, a = b + s c, 12 bytes
an element of three arrays of 200 MB. Ratios are to the best peer: of the medians, of the best, and
the median of what each round gives (the least moved by a neighbour who takes the memory bus for some rounds).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hf_dist

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
NBYTES = 34
BLOCKS = 12


def flat(numel: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], None]:
    """A peer on one flat tensor, then the copy to bf16."""
    p = nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel) * 1e-3
    low, optimizer = torch.empty(numel, dtype=torch.bfloat16), make([p])

    def step() -> None:
        optimizer.step()
        low.copy_(p.detach())

    return step


def ours(numel: int) -> Callable[[], None]:
    """An engine at stage 2 with the state on the host: the whole path of a step, one group of 48 matrices."""
    side = int((numel / BLOCKS / 4) ** 0.5)
    block = lambda: nn.ModuleDict({"inner": nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4)))})  # noqa: E731
    model = nn.ModuleList(block() for _ in range(BLOCKS))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu")
    assert engine.fragments is not None
    fragments = engine.fragments
    for group in engine.sharded.trainable_groups:
        group.gradient.add(torch.randn(group.layout.shard_numel) * 1e-3)

    def step() -> None:
        engine.sharded.storage.num_threads = torch.get_num_threads()
        fragments.step(lambda _: True)

    return step


def triad() -> Callable[[], None]:
    """What memory gives: 12 bytes per element."""
    a, b, c = (torch.randn(50_000_000) for _ in range(3))

    def step() -> None:
        torch.add(b, c, alpha=3.0, out=a)

    return step


def candidates(numel: int) -> dict[str, Callable[[], None]]:
    """Name -> one step with its write-back."""
    found = {
        "hf_dist offload step": ours(numel),
        "torch fused, flat": flat(numel, lambda ps: torch.optim.AdamW(ps, **OPTIONS, fused=True)),
        "torch foreach, flat": flat(numel, lambda ps: torch.optim.AdamW(ps, **OPTIONS, foreach=True)),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return found
    return {**found, "DeepSpeedCPUAdam, flat": flat(numel, lambda ps: DeepSpeedCPUAdam(ps, **OPTIONS, adamw_mode=True))}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--million", type=float, default=50)
    arguments = parser.parse_args()
    numel = int(arguments.million * 1e6)
    for count in arguments.threads:
        torch.set_num_threads(count)
        steps = {**candidates(numel), "triad": triad()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for k in range(arguments.rounds + 1):
            for name, step in random.Random(k).sample(list(steps.items()), len(steps)):  # nobody follows the same one
                start = time.perf_counter()
                step()
                if k:
                    seconds[name].append(time.perf_counter() - start)
        print(f"{count} threads, load {os.getloadavg()[0]:.1f}: median and best of {arguments.rounds}")
        bare = seconds.pop("triad")
        print(f"  memory bandwidth {0.6 / statistics.median(bare):.1f} GB/s, best {0.6 / min(bare):.1f}")
        own = seconds["hf_dist offload step"]
        peers = [times for times in seconds.values() if times is not own]
        for how, of in (("median", statistics.median), ("best", min)):
            print(f"  {how}: {min(map(of, peers)) / of(own):.3f} x the best peer")
        paired = [statistics.median(b / a for a, b in zip(own, times, strict=True)) for times in peers]
        print(f"  median of the rounds' ratios: {min(paired):.3f} x the best peer")
        for name, times in seconds.items():
            median, best = statistics.median(times), min(times)
            print(
                f"  {name:<24} {numel / median / 1e6:6.0f} {numel / best / 1e6:6.0f} M elements/s"
                f" {numel * NBYTES / median / 1e9:6.1f} {numel * NBYTES / best / 1e9:6.1f} GB/s"
            )


if __name__ == "__main__":
    main()
