"""Distillation without logits: the teacher's hidden states cross, and both heads are compared some rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist.errors import ModelError
from hf_dist.memory.loss.divergence import DIVERGENCES, Divergence, generalised_js, tiled_divergence
from hf_dist.memory.loss.lazy_logits import LazyLogits
from hf_dist.memory.loss.tiled_loss import tiled_loss_of
from hf_dist.memory.loss.tiles import Linear

__all__ = ["RemoteLoss", "remote_loss"]

IGNORED = -100
"""The label of a token that has no loss."""


def remote_loss(divergence: str | float | Divergence = "forward_kl", *, temperature: float = 1.0) -> RemoteLoss:
    """A distance between the distributions of a student and a teacher, for `loss = distance(student, teacher, batch)`.

    `divergence`: "forward_kl", "reverse_kl", "js", a number (the beta of GKD's generalised Jensen-Shannon, with TRL's limits:
    0 is forward KL), or an element-wise function of the student's and the teacher's log-probabilities, which is summed over
    the vocabulary. `temperature` divides both logits; the result is not multiplied by its square. Local.
    """
    if isinstance(divergence, str):
        if divergence not in DIVERGENCES:
            raise ModelError(
                f"remote_loss: {divergence!r} is none of {', '.join(DIVERGENCES)}, a number, or a function"
            )
        return RemoteLoss(DIVERGENCES[divergence], temperature)
    if isinstance(divergence, int | float):
        if not 0 <= divergence <= 1:
            raise ModelError(f"remote_loss: beta {divergence} is not between 0 and 1")
        return RemoteLoss(generalised_js(float(divergence)), temperature)
    return RemoteLoss(divergence, temperature)


class RemoteLoss:
    """Made by `remote_loss`."""

    def __init__(self, function: Divergence, temperature: float) -> None:
        self._function, self._temperature = function, temperature

    def __call__(
        self,
        student: nn.Module,
        teacher: Any,
        batch: Mapping[str, Any],
        labels: Tensor | None = None,
        *,
        count: Tensor | float | None = None,
    ) -> Tensor:
        """The divergence per token, 0D. Every rank of the trainer calls it, in place of the student's forward.

        `student`: a prepared model with a linear head; `teacher`: of the same vocabulary, `hf_dist.remote_model(...)` or a
        frozen model here whose head is whole between forwards. `labels` [rows, tokens] (default: `batch["labels"]`, else the
        unpadded tokens): -100 has no loss;
        the label at a place belongs to the logits before it, as in a language model's loss. `count`: tokens to divide by
        (default: those with a loss here). No tensor of tokens x vocabulary exists: what crosses is one vector per token,
        and the teacher's head once. Raises `ModelError` for other vocabularies, and where the head's input is not whole here.
        """
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        wanted = _labels(batch, inputs) if labels is None else labels
        tiled = tiled_loss_of(student)
        if tiled is None:
            raise ModelError(
                f'remote_loss: {type(student).__name__} is no prepared model with a head over a vocabulary, or has "hf_dist": '
                '{"tiled_loss": false}'
            )
        chosen = wanted[:, 1:] != IGNORED
        with torch.no_grad():
            answer = teacher.base_model(**inputs)  # under way while the student computes

        def taken(logits: LazyLogits) -> Tensor:
            if logits.shape[:2] != wanted.shape:
                raise ModelError(
                    f"remote_loss: the head of {type(student).__name__} is given {list(logits.shape[:2])} places for "
                    f"{list(wanted.shape)} labels: not with sequence_parallel_size, nor with logits_to_keep"
                )
            picked: Any = logits[:, :-1][chosen]
            theirs = _head_of(teacher, answer.last_hidden_state[:, :-1][chosen], picked)
            return tiled_divergence(
                picked.taken(), theirs, self._function, temperature=self._temperature, over=logits.over
            )

        with tiled.taken_by(taken):
            output = student(**inputs)
        total: Tensor = output.loss
        return total / (chosen.sum().clamp(min=1) if count is None else count)


def _labels(batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
    if "labels" in batch:
        labels: Tensor = batch["labels"]
        return labels
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids if mask is None else torch.where(mask.bool(), ids, IGNORED)


def _head_of(teacher: Any, hidden: Tensor, ours: LazyLogits) -> Linear:
    """The teacher's head over the columns that this rank has of the student's."""
    head = teacher.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if weight.shape[0] != ours.shape[-1]:
        raise ModelError(
            f"remote_loss: the teacher has a vocabulary of {weight.shape[0]} and the student one of {ours.shape[-1]}: their "
            "distributions cannot be compared token by token"
        )
    split = ours.vocabulary_split
    if split is not None:
        own = slice(split.first, split.first + ours.columns)
        weight, bias = weight[own], None if bias is None else bias[own]
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return Linear(
        hidden.to(dtype), weight.to(hidden.device, dtype), None if bias is None else bias.to(hidden.device, dtype)
    )
