"""The parity grid on GPUs, each rank with its own under NCCL, and two on one GPU over gloo, against one process on a CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.place import TOLERANCE, join, needs, rehearsed, worlds
from tests.harness import run_ranks
from tests.parallel.sequence import train as sequences
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
CUT = {
    2: rehearsed(
        [
            Case("llama", 3, 3, tp=2, sequence=True),
            *(Case("llama", stage, 3, tp=2, sequence=sequence) for stage in (0, 1) for sequence in (False, True)),
            *(Case("qwen3_moe", stage, 3, ep=2) for stage in (1, 2, 3)),
        ]
    ),
    4: [
        *(Case("llama", stage, 3, shard_size=2) for stage in (1, 2, 3)),
        *(Case("llama", stage, 3, tp=2) for stage in (1, 3)),
        *(Case("qwen3_moe", stage, 3, ep=2) for stage in (1, 3)),
    ],
}
"""Matrices or experts cut between ranks, and HSDP: some collectives are over a part of the ranks."""
SEQUENCES = rehearsed(
    [
        *(sequences.Case(exchange=how, stage=3, checkpointing=True) for how in ("ring", "ulysses", "gather")),
        *(sequences.Case(exchange="auto", stage=stage) for stage in (0, 1, 2)),
    ]
)


def on_ranks(rank: int, world: int, cases: list[Case], shared: bool) -> list[Any]:
    """Every case on this rank."""
    return run_cases(rank, world, cases, device=join(rank, world, shared=shared))


@functools.cache
def results(world: int, shared: bool, cut: bool = False) -> list[list[Any]]:
    """One spawn for all cases of a number of ranks."""
    return run_ranks(on_ranks, world, (CUT[world] if cut else CASES, shared), timeout=500)


def over_sequences(rank: int, world: int) -> list[Any]:
    """Every case in which ranks share sequences."""
    join(rank, world)
    return sequences.run_cases(rank, world, SEQUENCES)


@functools.cache
def shared_sequences() -> list[list[Any]]:
    """One spawn."""
    return run_ranks(over_sequences, 2, timeout=500)


def check(case: Case, ranks: list[Any]) -> None:
    """Losses and norms on every rank, weights as rank 0 has them."""
    check_equal(reference(replace(case, stage=0, shard_size=None, once=False, tp=1, ep=1)), ranks)


def check_equal(expected: dict[str, Any], ranks: list[Any]) -> None:
    """What one process has."""
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
    check(CASES[index], [rank[index] for rank in results(world, False)])


@needs(1)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_two_ranks_on_one_gpu_equal_one_process_on_the_cpu(index: int) -> None:
    check(CASES[index], [rank[index] for rank in results(2, True)])


def cells() -> list[Any]:
    """(ranks, case) of `CUT`."""
    found = []
    for size in worlds(list(CUT)):
        world, marks = (size.values[0], size.marks) if hasattr(size, "values") else (size, ())
        found += [pytest.param(world, i, id=str(case), marks=marks) for i, case in enumerate(CUT[world])]
    return found


@pytest.mark.parametrize(("world", "index"), cells())
def test_ranks_that_share_a_layer_equal_one_process_on_the_cpu(world: int, index: int) -> None:
    check(CUT[world][index], [rank[index] for rank in results(world, False, cut=True)])


@pytest.mark.parametrize("world", worlds([2]))
@pytest.mark.parametrize("index", range(len(SEQUENCES)), ids=[str(c) for c in SEQUENCES])
def test_ranks_that_share_sequences_equal_one_process_on_the_cpu(index: int, world: int) -> None:
    check_equal(sequences.reference(SEQUENCES[index], 1), [rank[index] for rank in shared_sequences()])


def mean_of_half(rank: int, world: int) -> dict[str, float]:
    """By dtype: how far the mean that was made in it is from that in fp32, relative."""
    from hf_dist.dist import collectives
    from hf_dist.dist.mesh import build_mesh

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
