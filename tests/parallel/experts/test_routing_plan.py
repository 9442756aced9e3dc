"""Every pair of a token and one of its experts is computed once, and its result comes back to its token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_dist.dist.mesh import MeshAxis
from hf_dist.parallel.experts.exchange import ExpertExchange
from hf_dist.parallel.experts.routing_plan import packed_counts, pairs_of, rows_to_send, unpacked
from hf_dist.tensors import host_read
from tests.host_reads import Waits


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 5),
    num_local=st.integers(1, 4),
    tokens=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_every_choice_is_a_pair_on_exactly_one_rank(ranks: int, num_local: int, tokens: int, seed: int) -> None:
    total = ranks * num_local
    k = min(3, total)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack(
        [torch.randperm(total, generator=generator)[:k] for _ in range(tokens)] or [torch.zeros(k)]
    ).long()
    chosen = chosen[:tokens]
    needed, counts = packed_counts(chosen, num_local, ranks)
    sent = unpacked(counts.tolist())
    assert sum(sent.pairs) == chosen.numel()
    with Waits() as waits:
        token = rows_to_send(needed, sum(sent.rows))
    assert sum(sent.rows) == int(needed.sum())
    found: list[tuple[int, int]] = []
    begin = 0
    for rank, count in enumerate(sent.rows):
        mine = token[begin : begin + count]
        assert mine.tolist() == sorted(set(mine.tolist()))
        with waits:
            row, choice, expert = pairs_of(chosen[mine], rank, num_local, sent.pairs[rank])
        assert set(row.tolist()) == set(range(count))  # no row without anything to do
        assert torch.equal(chosen[mine][row, choice], expert + rank * num_local)
        found += list(zip(mine[row].tolist(), (expert + rank * num_local).tolist(), strict=True))
        begin += count
    assert sorted(found) == sorted((t, int(e)) for t in range(tokens) for e in chosen[t])
    assert waits.seen == []


@pytest.mark.parametrize("tokens", [0, 7])
def test_a_layer_waits_once_in_forward_and_never_in_backward(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the numbers of rows and pairs of all ranks at once; the model's own experts (here: linear in one weight) aside."""
    read: list[torch.Tensor] = []
    monkeypatch.setattr(host_read, "on_host", lambda tensor: read.append(tensor) or tensor.numpy())

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, rows: Any, expert: Any, weights: Any) -> Any:
            return rows * self.weight.index_select(0, expert[:, 0]) * weights

    experts = Experts().train()
    exchange = ExpertExchange(experts, MeshAxis("ep", 1, 0, None), num_local=4)
    hidden, chosen = torch.randn(tokens, 8, requires_grad=True), torch.arange(2 * tokens).view(-1, 2) % 4
    with Waits() as waits:
        for _ in range(2):
            exchange(hidden, chosen, torch.ones(tokens, 2)).sum().backward()
    assert waits.seen == [] and len(read) == 2
    load = exchange.take_load()
    assert load is not None and load.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=4)).tolist()
