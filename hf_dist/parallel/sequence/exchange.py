"""Exchanges between the ranks that share a sequence, with their gradients.

    ToHeads       (B, H, s, D) of all heads -> (B, H/n, n s, D) of some; its backward is ToPositions, and vice versa
    GatherKeys    (B, H, s, D) -> (B, H, n s, D); the gradients of all ranks are summed
    Whole         an output that all ranks use alike -> whole; the gradient is this rank's part, times n
    TotalLoss     the sum of every rank's part of the loss; the gradient is multiplied by n

Times n, because the engine takes the mean over all ranks, including those that share a sequence: each has computed the same
loss, and its own part of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis


def to_heads(axis: MeshAxis, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values with all heads of this rank's positions -> some heads of all positions, in one exchange.

    Each is (B, H, s, D), with H a multiple of the axis; H and D may differ -> (B, H / n, n s, D). Collective over `axis`,
    also in backward. Sends (n - 1) / n of the elements.
    """
    return tuple(_ToHeads.apply(axis, *tensors)) if axis.size > 1 else tensors


def to_positions(axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
    """Some heads of all positions -> all heads of this rank's: (B, h, n s, D) -> (B, n h, s, D). Inverse of `to_heads`."""
    whole: torch.Tensor = _ToPositions.apply(axis, tensor) if axis.size > 1 else tensor
    return whole


def gather_keys(axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values of all ranks, in rank order: (B, H, s, D) -> (B, H, n s, D). Collective over `axis`."""
    whole: torch.Tensor = _GatherKeys.apply(axis, tensor) if axis.size > 1 else tensor
    return whole


def whole(axis: MeshAxis, part: torch.Tensor, undo: torch.Tensor | None, length: int) -> torch.Tensor:
    """(B, s, ...) on every rank -> (B, length, ...) on all; `undo`: the index that sorts positions. Collective over `axis`."""
    result: torch.Tensor = _Whole.apply(axis, part, undo, length)
    return result


def total_loss(axis: MeshAxis, part: torch.Tensor) -> torch.Tensor:
    """The sum of the parts of a loss. Collective over `axis`, in forward only."""
    result: torch.Tensor = _TotalLoss.apply(axis, part)
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        return _heads_of(axis, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        return (None, *_positions_of(ctx.axis, grads))


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return _positions_of(axis, (tensor,))[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        return None, _heads_of(ctx.axis, (grad,))[0]


def _heads_of(axis: MeshAxis, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    n = axis.size
    sent = [x.unflatten(1, (n, x.shape[1] // n)).movedim(1, 0) for x in tensors]  # (n, B, H/n, s, D)
    received = _exchanged(axis, sent)
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in received)


def _positions_of(axis: MeshAxis, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    n = axis.size
    sent = [x.unflatten(2, (n, x.shape[2] // n)).movedim(2, 0) for x in tensors]  # (n, B, h, s, D)
    received = _exchanged(axis, sent)
    return tuple(x.movedim(0, 1).flatten(1, 2) for x in received)


def _exchanged(axis: MeshAxis, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send entry i of every tensor to rank i; entry i of the results came from rank i. One collective for all tensors."""
    n = axis.size
    sent = torch.cat([x.reshape(n, -1) for x in tensors], dim=1)
    received = torch.empty_like(sent)
    collectives.all_to_all(axis, sent, received, [1] * n, [1] * n).wait()
    parts = received.split([math.prod(x.shape[1:]) for x in tensors], dim=1)
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def all_parts(axis: MeshAxis, part: torch.Tensor) -> torch.Tensor:
    """(n, *part.shape): the part of every rank. Collective over `axis`."""
    full = part.new_empty((axis.size, *part.shape))
    full[axis.rank] = part
    collectives.all_gather(axis, full.view(-1)).wait()
    return full


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return all_parts(axis, tensor).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        axis = ctx.axis
        parts = grad.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()
        own = torch.empty(parts[0].shape, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device)
        collectives.reduce_scatter(axis, parts.view(-1), own.view(-1)).wait()
        return None, own.mul_(axis.size).to(grad.dtype)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, part: torch.Tensor, undo: torch.Tensor | None, length: int) -> torch.Tensor:
        ctx.axis, ctx.undo, ctx.size = axis, undo, part.shape[1]
        full = all_parts(axis, part).movedim(0, 1).flatten(1, 2)
        if undo is not None:
            full = full.index_select(1, undo.to(full.device))
        return full[:, :length]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        axis, size = ctx.axis, ctx.size
        if ctx.undo is None:
            own = grad[:, axis.rank * size : (axis.rank + 1) * size]
            missing = size - own.shape[1]
            if missing:
                own = torch.cat([own, own.new_zeros(own.shape[0], missing, *own.shape[2:])], dim=1)
        else:
            at = torch.argsort(ctx.undo)[axis.rank * size : (axis.rank + 1) * size].to(grad.device)
            is_there = at < grad.shape[1]
            own = grad.index_select(1, at.clamp(max=grad.shape[1] - 1))
            own = own * is_there.view(1, -1, *[1] * (own.dim() - 2))
        return None, own * axis.size, None, None


class _TotalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, part: torch.Tensor) -> torch.Tensor:
        ctx.size = axis.size
        total = part.clone()
        collectives.all_reduce(axis, total.view(1), op="sum").wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        return None, grad * ctx.size
