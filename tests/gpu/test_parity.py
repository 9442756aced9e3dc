"""The parity grid on GPUs, each rank with its own under NCCL, and two on one GPU over gloo, against one process on a CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.place import TOLERANCE, join, needs, rehearsed, worlds
from tests.harness import run_ranks
from tests.parity.train import Case, reference, relative, run_cases

CASES = rehearsed(
    [
        *(
            Case(family, stage, 3, checkpointing=more, lora=more)
            for family in ("llama", "qwen3_moe", "bert")
            for stage in (3, 2, 1, 0)
            for more in (True, False)
        ),
        *(Case("llama", stage, 3, once=True) for stage in (2, 3)),
    ]
)
HSDP = [Case("llama", stage, 3, shard_size=2) for stage in (1, 2, 3)]


def on_ranks(rank: int, world: int, cases: list[Case], shared: bool) -> list[Any]:
    """Every case on this rank."""
    return run_cases(rank, world, cases, device=join(rank, world, shared=shared))


@functools.cache
def results(world: int, shared: bool, hybrid: bool) -> list[list[Any]]:
    """One spawn for all cases of a number of ranks."""
    return run_ranks(on_ranks, world, (HSDP if hybrid else CASES, shared), timeout=500)


def check(case: Case, ranks: list[Any]) -> None:
    """Losses and norms on every rank, weights as rank 0 has them."""
    expected = reference(replace(case, stage=0, shard_size=None, once=False))
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    weights = ranks[0]["weights"]
    worst = max(weights, key=lambda n: relative(weights[n], expected["weights"][n]))
    assert relative(weights[worst], expected["weights"][worst]) < TOLERANCE, worst


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
@pytest.mark.parametrize("world", worlds([1, 2, 3, 4]))
def test_equals_one_process_on_the_cpu(world: int, index: int) -> None:
    check(CASES[index], [rank[index] for rank in results(world, False, False)])


@needs(1)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_two_ranks_on_one_gpu_equal_one_process_on_the_cpu(index: int) -> None:
    check(CASES[index], [rank[index] for rank in results(2, True, False)])


@needs(4)
@pytest.mark.parametrize("index", range(len(HSDP)), ids=[str(c) for c in HSDP])
def test_groups_of_two_equal_one_process_on_the_cpu(index: int) -> None:
    check(HSDP[index], [rank[index] for rank in results(4, False, True)])


def mean_of_half(rank: int, world: int) -> dict[str, float]:
    """By dtype: how far the mean that was made in it is from that in fp32, relative."""
    from hf_dist import collectives
    from hf_dist.mesh import build_mesh

    device = join(rank, world)
    mesh = build_mesh(device=device)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        values = [torch.linspace(1, 2, 64 * world).mul(r + 1).to(dtype).to(device) for r in range(world)]
        exact = sum(v.float() for v in values) / world
        out = torch.empty(64, dtype=torch.float32, device=device)
        collectives.reduce_scatter(mesh.shard, values[rank].clone(), out).wait()
        part = exact.narrow(0, 64 * rank, 64)  # type: ignore[union-attr]
        found[str(dtype)] = float(((out - part) / part).mean())
    return found


@pytest.mark.parametrize("world", worlds([2, 3, 4, 8]))
def test_a_mean_in_half_precision_is_not_too_large(world: int) -> None:
    for errors in run_ranks(mean_of_half, world, timeout=200):
        for dtype, error in errors.items():
            # Rounding of single elements goes both ways; that of 1/n would move all of them by 2e-3.
            assert abs(error) < 5e-4, (dtype, error)
