"""The parity grid on CUDA: NCCL with one rank, gloo with two ranks on the one GPU; skipped without a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.train import Case, reference, relative, run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CASES = [
    Case(family, stage, 3, checkpointing=checkpointing, lora=lora)
    for family in ("llama", "qwen3_moe", "bert")
    for stage in range(4)
    for checkpointing, lora in ((False, False), (True, True))
]
# TF32 is off by default for matrix products; sums are made in another order than on the CPU.
TOLERANCE = 1e-4


def on_gpu(rank: int, world: int) -> list[Any]:
    """Every case on this rank: NCCL when it is alone on the GPU, gloo when the ranks share it."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl" if world == 1 else "gloo")
    return run_cases(rank, world, CASES, device="cuda:0")


@functools.cache
def results(world: int) -> list[list[Any]]:
    """One spawn per world size."""
    return run_ranks(on_gpu, world, timeout=500)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_equals_one_process_on_the_cpu(world: int, index: int) -> None:
    expected = reference(replace(CASES[index], stage=0))
    for rank in results(world):
        outcome = rank[index]
        assert not isinstance(outcome, str), outcome
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    weights = results(world)[0][index]["weights"]
    worst = max(weights, key=lambda n: relative(weights[n], expected["weights"][n]))
    assert relative(weights[worst], expected["weights"][worst]) < TOLERANCE, worst
