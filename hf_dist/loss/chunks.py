"""Cross-entropy of logits that are there, a few rows at a time.

In the plain order the fp32 copy of the logits, their log-softmax and its gradients exist for all rows, 12 bytes for each logit
and each of them a trip through memory. Here they exist for one chunk, which stays in a CPU's cache; only the gradient of the
logits is whole, in their own dtype. A chunk goes through torch's own operators, which treat rows apart, and the sum is
taken of all rows by torch's own loss: loss and gradient are those of the plain order, bit for bit. Price: the log-softmax
is computed again in backward, from the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from hf_dist.loss.vocabulary import VocabularySplit, split_log_probability

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""One fp32 tensor of a chunk: in a CPU's cache; on a GPU, not measured, meant to outlast the launch of its kernels."""

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Cast:
    """A change of dtype."""

    dtype: torch.dtype

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` in `dtype`."""
        return logits.to(self.dtype)


@dataclass(frozen=True)
class Computed:
    """Logits as they came from the head."""

    logits: torch.Tensor  # (..., V)
    after: tuple[Elementwise, ...] = ()
    """What the model does to them, element by element, in order."""
    split: VocabularySplit | None = None
    """Where these are some columns of the vocabulary, and other ranks have the rest."""

    def rows(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Computed:
        """The same of other rows: `view` leaves the last dimension as it is."""
        return replace(self, logits=view(self.logits))

    def full(self) -> torch.Tensor:
        """The logits with all that the model does to them. Collective where the vocabulary is split."""
        logits = self.logits if self.split is None else self.split.gather(self.logits)
        return _apply(self.after, logits)

    def cross_entropy(self, target: torch.Tensor, *, ignore_index: int, mean: bool) -> torch.Tensor:
        """`cross_entropy(self.full(), target)` for logits (N, V) and `target` (N,), the mean or the sum, 0-dim."""
        ignored = target == ignore_index
        after = self.after
        if torch.is_autocast_enabled(self.logits.device.type):  # it runs torch's cross_entropy in fp32
            after = (*after, Cast(torch.promote_types(self.logits.dtype, torch.float32)))
        chosen = target.masked_fill(ignored, 0).unsqueeze(1)
        if self.split is None:
            picked = _LogProbability.apply(self.logits, chosen, after)
        else:
            picked = split_log_probability(self.logits, chosen, after, self.split, _chunks)
        zero = torch.zeros_like(target).masked_fill_(ignored, -100)
        return functional.nll_loss(picked, zero, ignore_index=-100, reduction="mean" if mean else "sum")


def loss_nbytes(num_logits: int, itemsize: int, device: str) -> int:
    """The most that logits of `itemsize` bytes and their loss take at a time.

    They, their gradient, and of a chunk the cast, the log-softmax and two gradients.
    """
    chunk = min(4 * num_logits, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]))
    return 2 * num_logits * itemsize + chunk * (3 if itemsize >= 4 else 4)


def _apply(steps: tuple[Elementwise, ...], logits: torch.Tensor) -> torch.Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_BYTES.get(logits.device.type, CHUNK_BYTES["cuda"]) // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


class _LogProbability(torch.autograd.Function):
    """The log-probability of each row's target, (N, 1)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, after: tuple[Elementwise, ...]) -> torch.Tensor:
        """`target` (N, 1) of `logits` (N, V)."""
        ctx.save_for_backward(logits, target)
        ctx.after = after
        dtype = _apply(after, logits[:0]).dtype
        picked = torch.empty(len(logits), 1, dtype=dtype, device=logits.device)
        for rows in _chunks(logits):
            picked[rows] = torch.log_softmax(_apply(after, logits[rows]), 1).gather(1, target[rows])
        return picked

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Chunk by chunk; may run twice (a kept graph)."""
        logits, target = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        plain = all(isinstance(step, Cast) for step in ctx.after)
        for rows in _chunks(logits):
            with torch.set_grad_enabled(not plain):
                start = logits[rows].detach().requires_grad_(not plain)
                end = _apply(ctx.after, start)
            output = torch.log_softmax(end.detach(), 1)
            arrived = torch.zeros_like(output).scatter_(1, target[rows], grad[rows])
            # What autograd calls for log_softmax: another order of the same operations rounds differently.
            through = torch.ops.aten._log_softmax_backward_data(arrived, output, 1, output.dtype)
            found[rows] = through if plain else torch.autograd.grad(end, start, through)[0]
        return found, None, None
