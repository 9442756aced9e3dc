"""Forward and backward of the loss alone, HF's and in chunks: `python -m tests.memory.activation.bench_loss [--rounds 7]`.

One process, one thread, rounds of both in turn; medians in milliseconds, and the median of the rounds' ratios. What the
allocator does with freed memory is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from hf_dist.memory.loss.chunks import CHUNK_BYTES, Cast, Computed

SHAPES = ((1024, 6144), (512, 25600), (1024, 32000), (256, 128256))
"""Rows, vocabulary."""


def _plain(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), target)


def _chunked(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return Computed(logits, (Cast(torch.float32),)).cross_entropy(target, ignore_index=-100, mean=True)


def _seconds(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> tuple[float, torch.Tensor | None]:
    logits = source.clone().requires_grad_()
    start = time.perf_counter()
    loss(logits, target).backward()
    return time.perf_counter() - start, logits.grad


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, help="bytes of one fp32 tensor of a chunk")
    arguments = parser.parse_args()
    rounds, CHUNK_BYTES["cpu"] = arguments.rounds, arguments.chunk or CHUNK_BYTES["cpu"]
    torch.set_num_threads(1)
    print("| dtype | rows | vocabulary | HF's ms | chunks ms | ratio |\n|---|--:|--:|--:|--:|--:|")
    for dtype in (torch.bfloat16, torch.float32):
        for rows, vocabulary in SHAPES:
            source = (3 * torch.randn(rows, vocabulary)).to(dtype)
            target = torch.randint(0, vocabulary, (rows,))
            times: list[tuple[float, float]] = []
            for _ in range(rounds + 1):
                (plain, wanted), (chunked, found) = (_seconds(f, source, target) for f in (_plain, _chunked))
                assert wanted is not None and found is not None and torch.equal(wanted, found)
                times.append((plain, chunked))
            ratio = statistics.median(b / a for a, b in times[1:])
            of = [f"{1e3 * statistics.median(column):.0f}" for column in zip(*times[1:], strict=True)]
            print(f"| {str(dtype)[6:]} | {rows} | {vocabulary} | {of[0]} | {of[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
