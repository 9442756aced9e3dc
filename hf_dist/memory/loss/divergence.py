"""The distance between two heads' distributions, some rows at a time: neither model's logits of all rows ever exist.

A divergence is a sum over the vocabulary of a function of both log-probabilities, so ranks that share one sum their parts.
The built-in ones: Hinton et al., arXiv 1503.02531; Agarwal et al. (GKD), arXiv 2306.13649, whose `generalized_jsd_loss` in TRL
has the same limits: beta 0 is forward KL (teacher || student), beta 1 reverse KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_dist.memory.loss.chunks import Cast
from hf_dist.memory.loss.tiles import Linear, tile_rows, tiled_sum
from hf_dist.memory.loss.vocabulary import VocabularyPeers, VocabularySplit, applied

__all__ = ["DIVERGENCES", "Divergence", "generalised_js", "tiled_divergence"]

Divergence = Callable[[Tensor, Tensor], Tensor]
"""`f(s, t)` [rows, columns] of the student's and the teacher's log-probabilities [rows, columns]; it is summed over columns.
It sees only some columns where a vocabulary is split, so each element of the result depends on its own place alone."""
_TENSORS_PER_LOGIT = 4
"""Of a tile: both distributions in fp32, and what lies between them and the sum."""


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student)."""
    return teacher.exp() * (teacher - student)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher)."""
    return student.exp() * (student - teacher)


def generalised_js(beta: float) -> Divergence:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 - beta) student; KL at 0 and 1."""
    if beta in (0.0, 1.0):
        return reverse_kl if beta else forward_kl

    def function(student: Tensor, teacher: Tensor) -> Tensor:
        mixed = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        return beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)

    return function


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": generalised_js(0.5),
}
"""By name."""


def tiled_divergence(
    student: Linear, teacher: Linear, function: Divergence, *, temperature: float, over: Callable[[], None]
) -> Tensor:
    """The sum over rows of `function`, 0D, fp32 or wider. Collective over the ranks of a split vocabulary.

    `student`, `teacher`: heads with hidden states (N, D) and (N, D'); weights of the same vocabulary, split alike. Gradients go
    to the student alone. `temperature` divides both logits. `over` is called when backward passes through.
    """
    split, wide = student.split, torch.promote_types(student.hidden.dtype, torch.float32)

    def loss_of(product: Tensor, at: slice) -> Tensor:
        ours = _log_probabilities(applied((*student.after, Cast(wide)), product) / temperature, split)
        with torch.no_grad():
            other = functional.linear(teacher.hidden[at], teacher.weight, teacher.bias)
            theirs = _log_probabilities(applied((*teacher.after, Cast(wide)), other) / temperature, split)
            del other
        part = function(ours, theirs).sum()
        if split is None:
            return part
        # The value is that of all columns; the gradient is that of the own ones.
        return part + (split.peers.sum(part.detach()[None])[0] - part.detach())

    rows = max(1, tile_rows(student.vocabulary) // _TENSORS_PER_LOGIT)
    return tiled_sum(student, loss_of, over=over, rows=rows)


def _log_probabilities(logits: Tensor, split: VocabularySplit | None) -> Tensor:
    if split is None:
        return logits.log_softmax(-1)
    top = split.peers.max(logits.detach().amax(-1, keepdim=True))
    shifted = logits - top
    total: Any = _SumOfPeers.apply(shifted.exp().sum(-1, keepdim=True), split.peers)
    return shifted - total.log()


class _SumOfPeers(torch.autograd.Function):
    """The sum of all ranks' tensors, which each rank uses for a part of the loss: their gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: VocabularyPeers) -> Tensor:
        ctx.peers = peers
        return peers.sum(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grad), None
