"""The loss over a vocabulary that is split over ranks: each rank has some columns of the logits, and none has all.

The ranks exchange three numbers per row: the largest logit, then the sum of exponentials and the target's logit. Backward
needs no communication: each rank computes the gradient of its own columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Elementwise = Callable[[torch.Tensor], torch.Tensor]


class VocabularyPeers(Protocol):
    """The ranks that share a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ranks, including this one."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' tensors. Collective."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of all ranks' tensors. Collective."""


@dataclass(frozen=True)
class VocabularySplit:
    """The columns of the logits that this rank has."""

    peers: VocabularyPeers
    first: int
    """Index of this rank's first column in the whole vocabulary."""
    whole: int
    """Number of columns of all ranks."""
    gather: Elementwise
    """Gathers own columns (..., n) into all columns (..., whole), differentiably. Collective."""
    is_cut: Callable[[], bool] = lambda: True
    """Returns False while the head's weight is temporarily whole."""

    @property
    def width(self) -> int:
        """The largest number of columns on a rank."""
        return -(-self.whole // self.peers.size)


def split_log_probability(
    logits: torch.Tensor,
    target: torch.Tensor,
    after: tuple[Elementwise, ...],
    split: VocabularySplit,
    chunks: Callable[[torch.Tensor], Iterator[slice]],
) -> torch.Tensor:
    """The log-probability of each row's target, (N, 1), from own columns `logits` (N, n) and `target` (N, 1). Collective.

    `after`: element-wise operations that the model applies to the logits; `chunks`: returns the rows to process at a time.
    """
    picked: torch.Tensor = _SplitLogProbability.apply(logits, target, after, split, chunks)
    return picked


def applied(steps: tuple[Elementwise, ...], logits: torch.Tensor) -> torch.Tensor:
    """`logits` after the element-wise operations that the model applies to them. Local."""
    for step in steps:
        logits = step(logits)
    return logits


class _SplitLogProbability(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        after: tuple[Elementwise, ...],
        split: VocabularySplit,
        chunks: Callable[[torch.Tensor], Iterator[slice]],
    ) -> torch.Tensor:
        """Chunk by chunk; the log-softmax of a chunk is not kept."""
        dtype = applied(after, logits[:0]).dtype
        wide = torch.promote_types(dtype, torch.float32)
        own = target - split.first
        inside = (own >= 0) & (own < logits.shape[1])
        # A label of nobody's column stays out of range and raises as in one process.
        index = torch.where(~inside & (target >= 0) & (target < split.whole), 0, own)
        top = torch.empty(len(logits), 1, dtype=wide, device=logits.device)
        for rows in chunks(logits):
            top[rows] = applied(after, logits[rows]).amax(1, keepdim=True)
        top = split.peers.max(top)
        sums = torch.empty(len(logits), 2, dtype=wide, device=logits.device)
        for rows in chunks(logits):
            shifted = applied(after, logits[rows]).to(wide) - top[rows]
            sums[rows, 1:] = shifted.gather(1, index[rows]).masked_fill_(~inside[rows], 0.0)
            sums[rows, :1] = shifted.exp_().sum(1, keepdim=True)
        sums = split.peers.sum(sums)
        ctx.save_for_backward(logits, top, sums[:, :1].log(), index, inside)
        ctx.after, ctx.chunks = after, chunks
        return (sums[:, 1:] - sums[:, :1].log()).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the own columns; may run twice (a retained graph). Local."""
        logits, top, log_total, index, inside = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in ctx.chunks(logits):
            with torch.enable_grad():
                start = logits[rows].detach().requires_grad_()
                end = applied(ctx.after, start)
            through = (end.detach().to(top.dtype) - top[rows] - log_total[rows]).exp_().mul_(-grad[rows])
            through.scatter_add_(1, index[rows], (grad[rows] * inside[rows]).to(through.dtype))
            through = through.to(end.dtype)
            found[rows] = torch.autograd.grad(end, start, through)[0] if ctx.after else through
        return found, None, None, None, None
