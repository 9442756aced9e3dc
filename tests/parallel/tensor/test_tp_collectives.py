"""Each crossing between states of an activation against its formula in one process, on threads that are the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.peers import Peers, ThreadPeers, run_threads

SIZES = (2, 3)
ROWS, LENGTH, WIDTH = 2, 5, 7
"""Neither the length nor the width divides."""


def on_ranks(size: int, function: Callable[[Peers], Any]) -> list[Any]:
    return run_threads(size, function)


def whole(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def columns(rank: int, size: int) -> slice:
    return slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_cut_product_reads_gets_the_sum_of_the_ranks_gradients(size: int) -> None:
    def run(peers: Peers) -> Any:
        x = whole(0).requires_grad_()
        y = tp_collectives.to_replicated(x, peers)
        y.backward(whole(10 + peers.rank))
        return y.detach(), x.grad

    expected = torch.stack([whole(10 + rank) for rank in range(size)]).sum(0)
    for value, grad in on_ranks(size, run):
        assert torch.equal(value, whole(0))
        assert torch.allclose(grad, expected)


@pytest.mark.parametrize("size", SIZES)
def test_parts_of_a_sum_are_added_up_and_the_gradient_is_the_same_on_each(size: int) -> None:
    def run(peers: Peers) -> Any:
        x = whole(peers.rank).requires_grad_()
        y = tp_collectives.to_invariant(x, peers)
        y.backward(whole(10))
        return y.detach(), x.grad

    expected = torch.stack([whole(rank) for rank in range(size)]).sum(0)
    for value, grad in on_ranks(size, run):
        assert torch.allclose(value, expected)
        assert torch.equal(grad, whole(10))


@pytest.mark.parametrize("size", SIZES)
def test_columns_that_do_not_divide_are_gathered_and_taken_apart(size: int) -> None:
    def run(peers: Peers) -> Any:
        own = whole(0)[..., columns(peers.rank, size)].clone().requires_grad_()
        joined = tp_collectives.whole_columns(own, peers, WIDTH)
        joined.backward(whole(10))
        x = whole(1).requires_grad_()
        part = tp_collectives.to_columns(x, peers, WIDTH)
        part.backward(whole(11)[..., columns(peers.rank, size)])
        return joined.detach(), own.grad, part.detach(), x.grad

    for rank, (joined, own_grad, part, grad) in enumerate(on_ranks(size, run)):
        assert torch.equal(joined, whole(0))
        assert torch.equal(own_grad, whole(10)[..., columns(rank, size)])
        assert torch.equal(part, whole(1)[..., columns(rank, size)])
        assert torch.equal(grad, whole(11))


@pytest.mark.parametrize("size", SIZES)
def test_parts_of_a_sequence_of_any_length_are_those_of_the_padded_one(size: int) -> None:
    padded = -(-LENGTH // size) * size

    def own(t: torch.Tensor, rank: int) -> torch.Tensor:
        return tp_collectives.padded(t, 1, padded).chunk(size, 1)[rank]

    def run(peers: Peers) -> Any:
        x = whole(0).requires_grad_()
        part = tp_collectives.to_rows_of_sequence(x, peers, LENGTH)
        part.backward(own(whole(10), peers.rank))
        mine = own(whole(1), peers.rank).clone().requires_grad_()
        everything = tp_collectives.whole_sequence(mine, peers, LENGTH)
        everything.backward(whole(11))
        return part.detach(), x.grad, everything.detach(), mine.grad

    for rank, (part, grad, everything, mine_grad) in enumerate(on_ranks(size, run)):
        assert torch.equal(part, own(whole(0), rank))
        assert torch.equal(grad, whole(10))
        assert torch.equal(everything, whole(1))
        assert torch.equal(mine_grad, own(whole(11), rank))


@pytest.mark.parametrize("size", SIZES)
def test_a_region_over_parts_of_a_sequence_is_the_product_of_one_process(size: int) -> None:
    """S -> R, a column and a row product, P -> S: values, gradients of the input and of both weights."""
    first, second = whole(2)[0], whole(3)[0].t()  # (LENGTH, WIDTH) as (hidden, inner); (inner, hidden)
    width = WIDTH - WIDTH % size
    x = whole(4).transpose(1, 2)  # (rows, WIDTH as the sequence, LENGTH as hidden)
    length = x.shape[1]

    def product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ a) @ b

    def reference() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), first[:, :width].clone().requires_grad_()]
        leaves.append(second[:width].clone().requires_grad_())
        out = product(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    def run(peers: Peers) -> Any:
        part = slice(peers.rank * width // size, (peers.rank + 1) * width // size)
        inner = x.clone().requires_grad_()
        a, b = first[:, part].clone().requires_grad_(), second[part].clone().requires_grad_()
        own = tp_collectives.to_rows_of_sequence(inner, peers, length)
        entered = tp_collectives.whole_sequence_replicated(own, peers, length)
        left = tp_collectives.sum_over_sequence(product(entered, a, b), peers, length)
        out = tp_collectives.whole_sequence(left, peers, length)
        out.square().sum().backward()
        return out.detach(), inner.grad, a.grad, b.grad

    value, grad, a_grad, b_grad = reference()
    ranks = on_ranks(size, run)
    for out, inner, _, _ in ranks:
        assert torch.allclose(out, value)
        assert torch.allclose(inner, grad)
    assert torch.allclose(torch.cat([a for *_, a, _ in ranks], 1), a_grad)
    assert torch.allclose(torch.cat([b for *_, b in ranks]), b_grad)


def test_an_error_on_one_thread_ends_all_of_them() -> None:
    def run(peers: Peers) -> None:
        if peers.rank == 1:
            raise ValueError("the second rank fails")
        peers.sum(torch.ones(1))

    with pytest.raises(ValueError, match="the second rank fails"):
        on_ranks(3, run)


@pytest.mark.parametrize("name", ["to_invariant", "whole_columns", "to_rows_of_sequence", "whole_sequence"])
def test_models_may_write_into_what_a_crossing_returns(name: str) -> None:
    """One row makes every part contiguous as it lies: a view, which autograd would refuse."""

    def run(peers: Peers) -> None:
        x = torch.randn(1, 4, 6, requires_grad=True)
        extra = {"whole_columns": 12, "to_rows_of_sequence": 4, "whole_sequence": 8}.get(name, 0)
        out = getattr(tp_collectives, name)(x * 1.0, peers, extra)
        out += 1
        out.sum().backward()

    on_ranks(2, run)


def test_a_rank_may_write_into_its_tensor_while_others_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = ThreadPeers._everyone

    def slow(peers: ThreadPeers, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = meet(peers, tensor)
        time.sleep(0.1 * peers.rank)
        return everyone

    def run(peers: Peers) -> Any:
        given = torch.ones(3)
        total = peers.sum(given)
        given.fill_(9)
        return total

    monkeypatch.setattr(ThreadPeers, "_everyone", slow)
    assert all(torch.equal(total, torch.full((3,), 2.0)) for total in on_ranks(2, run))
