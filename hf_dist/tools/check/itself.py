"""What no layout can mend: a model that draws random numbers by itself, or whose loss depends on which rows are together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.tools.check.data import IGNORED, joined

__all__ = ["TOGETHER", "TWICE", "itself"]

TWICE, TOGETHER = "the same forward twice", "rows together, rows apart"
_ALLOWED = 1e-4
"""Relative; sums in another order differ by less."""


@torch.no_grad()
def itself(model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Name of a comparison -> the two losses, for those that differ. Local; four forwards in training mode.

    Two batches of microbatches are one batch to a process, so its loss is a mean of theirs: of rows, of labels, or of means.
    A batch normalisation has fixed statistics here (`Job.make_model`).
    """
    pair = [dict(batch) for batch in _unlike(batches)]
    first = [_loss(model, batch) for batch in pair]
    torch.rand(17)  # other random numbers than before
    again = _loss(model, pair[0])
    if not _near(again, first[0]):
        return {TWICE: (first[0], again)}
    both = joined(pair)
    if len(pair) < 2 or both is None:
        return {}
    together = _loss(model, both)
    means = [sum(w * x for w, x in zip(weights, first, strict=True)) / sum(weights) for weights in _weights(pair)]
    if any(_near(together, mean) for mean in means):
        return {}
    return {TOGETHER: (together, min(means, key=lambda mean: abs(mean - together)))}


def _unlike(batches: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[Mapping[str, torch.Tensor]]:
    """The first two, or the first one and one without padding: transformers makes no mask for it, and some classes then look
    at other tokens (PaliGemma)."""
    full = [batch for batch in batches[1:] if bool(batch.get("attention_mask", torch.zeros(1)).all())]
    return [*batches[:1], *(full[:1] or batches[1:2])]


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> float:
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ModelError(
            f"{type(model).__name__} gives no loss for rows with {', '.join(sorted(batch))}. Pass --data FILE.jsonl with one "
            "row per line, keys as the model's arguments, with its labels"
        )
    return float(loss)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _ALLOWED * max(abs(a), abs(b))


def _weights(pair: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[list[float]]:
    """Of two batches: alike, by rows, by labels, by labels of a next token."""
    yield [1.0, 1.0]
    yield [float(len(next(iter(batch.values())))) for batch in pair]
    labels = [batch.get("labels") for batch in pair]
    if all(x is not None and not x.is_floating_point() for x in labels):
        counts = [[float((x[:, skip:] if x.dim() > 1 else x).ne(IGNORED).sum()) for x in labels] for skip in (0, 1)]  # type: ignore[union-attr, index]
        yield from (found for found in counts if sum(found))
