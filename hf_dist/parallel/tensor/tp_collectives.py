"""How an activation changes from one state to another between the ranks of a split, in forward and backward.

    state   value on the ranks        its gradient on the ranks
    I       equal                     equal, each whole
    R       equal                     parts of a sum
    V       own heads or columns      its own
    P       parts of a sum            equal, each whole
    S       own part of the sequence  its own

An activation that no plan names is I. A wrong state raises no error; it gives a gradient that is off by a factor, so plans
are verified. A sequence that does not divide is padded inside a crossing and cut again; dimension 1 is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.tensor.overlap import Crossed, crossed_early
from hf_dist.parallel.tensor.peers import Peers, Started

__all__ = [
    "columns_of",
    "own_part",
    "padded",
    "sum_over_sequence",
    "to_columns",
    "to_equal_gradient",
    "to_invariant",
    "to_replicated",
    "to_replicated_early",
    "to_rows_of_sequence",
    "whole_columns",
    "whole_columns_replicated",
    "whole_rows",
    "whole_sequence",
    "whole_sequence_early",
    "whole_sequence_replicated",
    "zeros_of",
]

Step = Callable[[Peers, torch.Tensor, torch.Size, int], torch.Tensor]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, peers: Peers, there: Step, back: Step, extra: int) -> torch.Tensor:
        ctx.peers, ctx.back, ctx.extra, ctx.shape = peers, back, extra, tensor.shape
        out = there(peers, tensor, tensor.shape, extra)
        # Models write into their layers' outputs, which autograd refuses for a view created here.
        return out.clone() if out._is_view() and there is not _same else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(ctx.peers, grad, ctx.shape, ctx.extra), None, None, None, None


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape, with a gradient of zeros, for values that another rank of the split adds. Local."""
    zeros: torch.Tensor = _Zeros.apply(tensor)
    return zeros


def padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`tensor`, padded with zeros to `length` along `dim`."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def own_part(peers: Peers, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of `size` equal parts along `dim`, contiguous."""
    length = tensor.shape[dim] // peers.size
    return tensor.narrow(dim, peers.rank * length, length).contiguous()


def _up(length: int, size: int) -> int:
    return -(-length // size) * size


def _same(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return peers.sum(tensor)


def _share(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return tensor / peers.size


def _own_columns(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    first, last = columns_of(peers, extra)
    return tensor[..., first:last].contiguous()


def _own_of_sum(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return _own_columns(peers, peers.sum(tensor), shape, extra)


def _join_columns(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return _joined(peers, tensor, tensor.ndim - 1, extra)


def _joined(peers: Peers, tensor: torch.Tensor, dim: int, whole: int) -> torch.Tensor:
    """All ranks' slices joined along `dim`, `whole` elements in total; slices need not be equal."""
    parts = peers.parts(padded(tensor, dim, -(-whole // peers.size)))
    lengths = [(rank + 1) * whole // peers.size - rank * whole // peers.size for rank in range(peers.size)]
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def _join_weight(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return _joined(peers, tensor, 0, extra)


def _own_of_weight(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    first, last = columns_of(peers, extra)
    return tensor[first:last].contiguous()


def columns_of(peers: Peers, width: int) -> tuple[int, int]:
    """This rank's part of `width` columns: first, one past the last."""
    return peers.rank * width // peers.size, (peers.rank + 1) * width // peers.size


def _own_rows(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return own_part(peers, padded(tensor, 1, _up(extra, peers.size)), 1)


def _join_rows(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    joined = torch.cat(peers.parts(tensor), 1)
    return joined if joined.shape[1] == extra else joined[:, :extra].contiguous()


def _scatter_rows(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> torch.Tensor:
    return peers.scatter_sum(padded(tensor, 1, _up(extra, peers.size)), 1)


def _crossing(there: Step, back: Step) -> Callable[..., torch.Tensor]:
    def cross(tensor: torch.Tensor, peers: Peers, extra: int = 0) -> torch.Tensor:
        crossed: torch.Tensor = _Cross.apply(tensor, peers, there, back, extra)
        return crossed

    return cross


to_replicated = _crossing(_same, _sum)
"""I -> R: the input of products split by columns. `(tensor, peers)`."""
to_invariant = _crossing(_sum, _same)
"""P -> I: the output of products split by rows. `(tensor, peers)`."""
to_equal_gradient = _crossing(_same, _share)
"""R -> I: for what leaves a region without being summed. `(tensor, peers)`."""
to_columns = _crossing(_own_columns, _join_columns)
"""I -> V. `(tensor, peers, columns of the whole)`."""
whole_columns = _crossing(_join_columns, _own_columns)
"""V -> I. `(tensor, peers, columns of the whole)`."""
whole_columns_replicated = _crossing(_join_columns, _own_of_sum)
"""V -> R: inside a region. `(tensor, peers, columns of the whole)`."""
whole_rows = _crossing(_join_weight, _own_of_weight)
"""V -> I, for a weight split along its first dimension. `(tensor, peers, rows of the whole)`."""
to_rows_of_sequence = _crossing(_own_rows, _join_rows)
"""I -> S. `(tensor, peers, length)`."""
whole_sequence = _crossing(_join_rows, _own_rows)
"""S -> I. `(tensor, peers, length)`."""
whole_sequence_replicated = _crossing(_join_rows, _scatter_rows)
"""S -> R: at the start of a region. `(tensor, peers, length)`."""
sum_over_sequence = _crossing(_scatter_rows, _join_rows)
"""P -> S: at the end of a region. `(tensor, peers, length)`."""


# ---- the same two, of which the sum of backward begins early (`overlap.py`)


def _begin_sum(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> Started:
    return peers.start_sum(tensor)


def _begin_scatter(peers: Peers, tensor: torch.Tensor, shape: torch.Size, extra: int) -> Started:
    return peers.start_scatter_sum(padded(tensor, 1, _up(extra, peers.size)), 1)


def to_replicated_early(tensor: torch.Tensor, peers: Peers, products: Sequence[nn.Module]) -> Crossed:
    """I -> R, read by `products`."""
    return crossed_early(tensor, peers, _same, _begin_sum, 0, products)


def whole_sequence_early(tensor: torch.Tensor, peers: Peers, length: int, products: Sequence[nn.Module]) -> Crossed:
    """S -> R, read by `products`."""
    return crossed_early(tensor, peers, _join_rows, _begin_scatter, length, products)
