"""Every pair of a token and one of its experts is computed once, and its result comes back to its token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.parallel.experts.routing_plan import pairs_of, rows_to_send


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
    token, sent = rows_to_send(chosen, num_local, ranks)
    assert int(sent.sum()) == len(token)
    found: list[tuple[int, int]] = []
    begin = 0
    for rank, count in enumerate(sent.tolist()):
        mine = token[begin : begin + count]
        assert mine.tolist() == sorted(set(mine.tolist()))
        row, choice, expert = pairs_of(chosen[mine], rank, num_local)
        assert set(row.tolist()) == set(range(count))  # no row without anything to do
        assert torch.equal(chosen[mine][row, choice], expert + rank * num_local)
        found += list(zip(mine[row].tolist(), (expert + rank * num_local).tolist(), strict=True))
        begin += count
    assert sorted(found) == sorted((t, int(e)) for t in range(tokens) for e in chosen[t])
