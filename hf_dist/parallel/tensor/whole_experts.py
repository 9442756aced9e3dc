"""Experts that stay whole while everything else is split over ranks: each rank computes its part of the rows.

    outside regions      I -> S along the rows, and S -> I for the results
    in a region          own rows of R; zeros for the others' rows, which makes it P
    between regions      activations already are own parts of the sequence

The gradient of an expert, and of an adapter on it, comes from a rank's own rows: it is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.peers import Peers

__all__ = ["compute_own_rows"]


def compute_own_rows(module: nn.Module, peers: Peers, applies: Callable[[], bool], *, in_region: bool) -> None:
    """Make `module` compute 1/size of the rows on each rank of `peers`, by hooks, while `applies()` is true. Local.

    The module is called with hidden states (tokens, features), chosen experts and weights (tokens, k).
    """
    shapes: list[torch.Size] = []
    """Shapes of the hidden states of the running calls."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not applies():
            return None
        hidden, chosen, weights = (*args, *kwargs.values())
        shapes.append(hidden.shape)
        rows = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = (t.reshape(len(rows), -1) for t in (chosen, weights))
        change = _own if in_region else _scattered
        return (change(rows, peers), _own(chosen, peers), change(weights, peers)), {}

    def leave(_: nn.Module, args: object, output: torch.Tensor | None) -> torch.Tensor | None:
        shape = shapes.pop() if shapes else None
        if shape is None or output is None:  # an error is being raised
            return None
        count = shape.numel() // shape[-1]
        if in_region:
            before, behind = (output.new_zeros(n * len(output), output.shape[1]) for n in _others(peers))
            return torch.cat([before, output, behind])[:count].reshape(shape)
        return tp_collectives.whole_sequence(output.unsqueeze(0), peers, count).reshape(shape)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, prepend=True, always_call=True)


def _others(peers: Peers) -> tuple[int, int]:
    """Number of ranks before this one, and after it."""
    return peers.rank, peers.size - peers.rank - 1


def _own(rows: torch.Tensor, peers: Peers) -> torch.Tensor:
    return tp_collectives.own_part(peers, tp_collectives.padded(rows, 0, -(-len(rows) // peers.size) * peers.size), 0)


def _scattered(rows: torch.Tensor, peers: Peers) -> torch.Tensor:
    return tp_collectives.to_rows_of_sequence(rows.unsqueeze(0), peers, len(rows)).squeeze(0)
