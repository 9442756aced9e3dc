"""Cross-entropy of computed logits, a few rows at a time.

In the plain computation, the fp32 copy of the logits, their log-softmax and its gradients exist for all rows: 12 bytes per
logit, each passed through memory. Here they exist for one chunk, which stays in a CPU's cache. Only the gradient of the logits
is whole, in their own dtype. torch's own operators, which treat rows separately, process a chunk, and torch's own loss sums all
rows, so loss and gradient are bitwise those of the plain computation. The cost: backward computes the log-softmax again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from hf_dist.memory.loss.vocabulary import VocabularySplit, applied, split_log_probability

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Bytes of one fp32 tensor of a chunk. On a CPU it fits into the cache. On a GPU (not measured) it should hide launch times."""

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Cast:
    """A change of dtype."""

    dtype: torch.dtype

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` cast to `dtype`."""
        return logits.to(self.dtype)


@dataclass(frozen=True)
class Computed:
    """Logits as the head returned them."""

    logits: torch.Tensor  # (..., V)
    after: tuple[Elementwise, ...] = ()
    """Element-wise operations that the model applies to them, in order."""
    split: VocabularySplit | None = None
    """How the vocabulary is split, if these are some of its columns; None if they are all."""

    def rows(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Computed:
        """The same with `view` applied to the rows; `view` must not change the last dimension."""
        return replace(self, logits=view(self.logits))

    def full(self) -> torch.Tensor:
        """The logits with all pending operations applied. Collective over the ranks of a split vocabulary."""
        logits = self.logits if self.split is None else self.split.gather(self.logits)
        return applied(self.after, logits)

    def cross_entropy(self, target: torch.Tensor, *, ignore_index: int, mean: bool) -> torch.Tensor:
        """`cross_entropy(self.full(), target)`, mean or sum, 0-dim; logits (N, V), `target` (N,). Collective like `full`."""
        ignored = target == ignore_index
        after = self.after
        if torch.is_autocast_enabled(self.logits.device.type):  # autocast runs torch's cross_entropy in fp32
            after = (*after, Cast(torch.promote_types(self.logits.dtype, torch.float32)))
        chosen = target.masked_fill(ignored, 0).unsqueeze(1)
        _check_range(chosen, self.logits.shape[1] if self.split is None else self.split.whole)
        if self.split is None:
            picked = _LogProbability.apply(self.logits, chosen, after)
        else:
            picked = split_log_probability(self.logits, chosen, after, self.split, _chunks)
        zero = torch.zeros_like(target).masked_fill_(ignored, -100)
        return functional.nll_loss(picked, zero, ignore_index=-100, reduction="mean" if mean else "sum")


def _check_range(target: torch.Tensor, size: int) -> None:
    """Raise `IndexError` in torch's words for a label of no column. On a GPU the kernel stops, and nothing is read here."""
    # A subclass may have no elements: a plan is made of such tensors.
    if type(target) is torch.Tensor and target.device.type == "cpu":
        wrong = target[(target < 0) | (target >= size)]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def loss_nbytes(num_logits: int, itemsize: int, device: str) -> int:
    """Peak memory of logits with `itemsize` bytes each and their loss.

    It counts the logits, their gradient, and the cast, the log-softmax and two gradients of a chunk.
    """
    chunk = min(4 * num_logits, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]))
    return 2 * num_logits * itemsize + chunk * (3 if itemsize >= 4 else 4)


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_BYTES.get(logits.device.type, CHUNK_BYTES["cuda"]) // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


class _LogProbability(torch.autograd.Function):
    """The log-probability of each row's target, (N, 1)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, after: tuple[Elementwise, ...]) -> torch.Tensor:
        """Chunk by chunk, for `logits` (N, V) and `target` (N, 1)."""
        ctx.save_for_backward(logits, target)
        ctx.after = after
        dtype = applied(after, logits[:0]).dtype
        picked = torch.empty(len(logits), 1, dtype=dtype, device=logits.device)
        for rows in _chunks(logits):
            picked[rows] = torch.log_softmax(applied(after, logits[rows]), 1).gather(1, target[rows])
        return picked

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Chunk by chunk; may run twice (a retained graph)."""
        logits, target = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: by operators that can be differentiated again
            picked = torch.log_softmax(applied(ctx.after, logits), 1).gather(1, target)
            return torch.autograd.grad(picked, logits, grad, create_graph=True)[0], None, None
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        plain = all(isinstance(step, Cast) for step in ctx.after)
        for rows in _chunks(logits):
            with torch.set_grad_enabled(not plain):
                start = logits[rows].detach().requires_grad_(not plain)
                end = applied(ctx.after, start)
            output = torch.log_softmax(end.detach(), 1)
            arrived = torch.zeros_like(output).scatter_(1, target[rows], grad[rows])
            # The operator that autograd calls for log_softmax: another order of operations would round differently.
            through = torch.ops.aten._log_softmax_backward_data(arrived, output, 1, output.dtype)
            found[rows] = through if plain else torch.autograd.grad(end, start, through)[0]
        return found, None, None
