"""Where a layer's rows are sent and returned from in one forward. Pure arithmetic on the router's choices.

A token is sent once to each rank that has at least one of its experts. Rows are sorted by rank, then by token. A pair is a
received row together with one of its local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RoutingPlan", "even_plan", "pairs_of", "rows_to_send"]


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The routing of one layer on one rank of the axis."""

    token: torch.Tensor
    """(rows sent): the token of each row."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    row: torch.Tensor
    """(pairs): the received row of each pair."""
    choice: torch.Tensor
    """(pairs): index of the pair among the row's choices, 0 .. k - 1."""
    expert: torch.Tensor
    """(pairs): the expert, counted from the first local one."""


def rows_to_send(chosen: torch.Tensor, num_local: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token of each row, rows to each rank) for the experts `chosen` (tokens, k), with `num_local` experts per rank."""
    needed = torch.zeros((len(chosen), ranks), dtype=torch.bool, device=chosen.device)
    needed.scatter_(1, chosen // num_local, True)
    return needed.t().nonzero()[:, 1], needed.sum(0)


def pairs_of(chosen: torch.Tensor, rank: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, choice, local expert) for every choice in `chosen` (rows, k) that is an expert of `rank`."""
    row, choice = (chosen // num_local == rank).nonzero(as_tuple=True)
    return row, choice, chosen[row, choice] - rank * num_local


def even_plan(chosen: torch.Tensor, ranks: int) -> RoutingPlan:
    """Routing as if every expert were chosen equally often, each token's on different ranks, for `chosen` (tokens, k)."""
    tokens, k = chosen.shape
    each = tokens * min(k, ranks) // ranks
    places = [torch.zeros(n, dtype=torch.long, device=chosen.device) for n in (each * ranks, *(tokens * k,) * 3)]
    return RoutingPlan(places[0], [each] * ranks, [each] * ranks, *places[1:])
