"""Exchanges on ranks: they undo each other, their gradients are right, and they send what the formulas say."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

B, D, S = 2, 3, 12


def exchange(rank: int, world: int) -> dict[str, Any]:
    """Everything that is asked below."""
    import hf_dist.parallel.sequence.exchange as ours
    from hf_dist.dist import collectives, comm_counter
    from hf_dist.dist.axes import Axes
    from hf_dist.dist.mesh import build_mesh

    axis = build_mesh(axes=lambda n: Axes.of(n, cp=n), device="cpu").cp
    heads, own = 2 * world, S // world
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(B, heads, S, D, generator=draw, dtype=torch.float64)
    weight = torch.randn(B, heads, S, D, generator=draw, dtype=torch.float64)
    mine = slice(rank * own, (rank + 1) * own)
    found: dict[str, Any] = {}

    part = whole[:, :, mine].clone().requires_grad_()
    with comm_counter.record() as log:
        some, wide = ours.to_heads(axis, part, part[:, :world].repeat(1, 1, 1, 2))
    found["heads bytes"] = log.nbytes()
    at = slice(rank * 2, rank * 2 + 2)
    found["heads"] = torch.equal(some, whole[:, at]) and wide.shape == (B, 1, S, 2 * D)
    found["back"] = torch.equal(ours.to_positions(axis, some), part)
    (some * weight[:, at]).sum().backward()
    found["heads gradient"] = torch.allclose(part.grad, weight[:, :, mine], atol=1e-14)

    part = whole[:, :, mine].clone().requires_grad_()
    with comm_counter.record() as log:
        keys = ours.gather_keys(axis, part)
        found["gather bytes"] = log.nbytes()
        found["gather"] = torch.equal(keys, whole)
        (keys * weight * (rank + 1)).sum().backward()
        found["gather backward bytes"] = log.nbytes() - found["gather bytes"]
    ranks = sum(range(1, world + 1))
    found["gather gradient"] = torch.allclose(part.grad, ranks * weight[:, :, mine], rtol=1e-6)

    part = whole[:, 0, mine].clone().requires_grad_()
    logits = ours.whole(axis, part, None, S - 1)
    found["whole"] = torch.equal(logits, whole[:, 0, : S - 1])
    (logits * weight[:, 0, : S - 1]).sum().backward()
    expected = world * torch.cat([weight[:, 0, : S - 1], torch.zeros(B, 1, D)], 1)[:, mine]
    found["whole gradient"] = torch.allclose(part.grad, expected, rtol=1e-12)

    loss = torch.tensor(float(rank + 1), requires_grad=True)
    total = ours.total_loss(axis, loss)
    total.backward()
    found["loss"] = (float(total.detach()), float(loss.grad))

    sent, received = torch.full((4,), float(rank)), torch.empty(4)
    with comm_counter.record() as log:
        collectives.shift(axis, sent, received).wait()
    found["shift"] = (received.tolist(), log.nbytes())
    return found


@functools.cache
def results(world: int) -> list[dict[str, Any]]:
    return run_ranks(exchange, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "what", ["heads", "back", "heads gradient", "gather", "gather gradient", "whole", "whole gradient"]
)
def test_what_is_exchanged_arrives(world: int, what: str) -> None:
    for outcome in results(world):
        assert outcome[what] is True


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_equal_the_formulas(world: int) -> None:
    """n ranks, s = S / n positions: Ulysses (n-1)/n of its tensors, gather (n-1) of its own part, both ways."""
    own, heads, size = S // world, 2 * world, 8
    for outcome in results(world):
        elements = B * own * (heads * D + world * 2 * D)
        assert outcome["heads bytes"] == (world - 1) * elements * size // world
        assert outcome["gather bytes"] == (world - 1) * B * heads * own * D * size
        assert outcome["gather backward bytes"] == outcome["gather bytes"]


@pytest.mark.parametrize("world", [2, 3])
def test_the_loss_is_the_sum_and_counts_once_for_every_rank_of_the_mean(world: int) -> None:
    for outcome in results(world):
        assert outcome["loss"] == (sum(range(1, world + 1)), world)


@pytest.mark.parametrize("world", [2, 3])
def test_a_shift_goes_round(world: int) -> None:
    for rank, outcome in enumerate(results(world)):
        assert outcome["shift"] == ([float((rank - 1) % world)] * 4, 16)
