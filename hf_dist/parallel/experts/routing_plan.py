"""Where a layer's rows are sent and returned from in one forward. Pure arithmetic on the router's choices.

A token is sent once to each rank that has at least one of its experts. Rows are sorted by rank, then by token. A pair is a
received row together with one of its local experts. On a GPU nothing here makes the host wait: it is told the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["Counts", "RoutingPlan", "even_plan", "packed", "packed_counts", "pairs_of", "rows_to_send", "unpacked"]


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


@dataclass(frozen=True)
class Counts:
    """How much goes to each rank, and how much comes from it: what the host must know to size its tensors."""

    rows: list[int]
    pairs: list[int]


Number = TypeVar("Number", int, torch.Tensor)
_SHIFT = 1 << 32
"""Numbers of rows and of pairs travel as one."""


def packed_counts(chosen: torch.Tensor, num_local: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each token goes to each rank (ranks, tokens), rows and pairs to each rank, packed), on the device.

    `chosen`: experts (tokens, k), with `num_local` experts per rank.
    """
    target = chosen // num_local
    needed = torch.zeros((len(chosen), ranks), dtype=torch.bool, device=chosen.device)
    needed.scatter_(1, target, True)
    pairs = torch.zeros(ranks, dtype=torch.long, device=chosen.device)
    pairs.index_add_(0, target.flatten(), torch.ones_like(target.flatten()))
    return needed.t(), packed(needed.sum(0), pairs)


def packed(rows: Number, pairs: Number) -> Number:
    """Both as one number."""
    return rows * _SHIFT + pairs


def unpacked(counts: list[int]) -> Counts:
    """Of the numbers of `packed_counts`, on the host."""
    return Counts([number // _SHIFT for number in counts], [number % _SHIFT for number in counts])


def rows_to_send(needed: torch.Tensor, number: int) -> torch.Tensor:
    """The token of each of `number` rows, sorted by rank, then by token. `needed`: from `packed_counts`."""
    return torch.nonzero_static(needed, size=number)[:, 1]


def pairs_of(
    chosen: torch.Tensor, rank: int, num_local: int, number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, choice, local expert) for each of the `number` choices in `chosen` (rows, k) that are experts of `rank`."""
    row, choice = torch.nonzero_static(chosen // num_local == rank, size=number).unbind(1)
    return row, choice, chosen[row, choice] - rank * num_local


def even_plan(chosen: torch.Tensor, ranks: int) -> RoutingPlan:
    """Routing as if every expert were chosen equally often, each token's on different ranks, for `chosen` (tokens, k)."""
    tokens, k = chosen.shape
    each = tokens * min(k, ranks) // ranks
    places = [torch.zeros(n, dtype=torch.long, device=chosen.device) for n in (each * ranks, *(tokens * k,) * 3)]
    return RoutingPlan(places[0], [each] * ranks, [each] * ranks, *places[1:])
