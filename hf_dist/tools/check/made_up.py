"""Rows made up for a class: ragged, with every label that its forward names, in the values that the class takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils import find_labels

from hf_dist.errors import ModelError
from hf_dist.model_config import field, text_config

__all__ = ["IGNORED", "Batch", "labels_are_ids", "made_up"]

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""The label of what counts for nothing."""
_PER_ROW = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_TWO_WAYS = ("next_sentence_label", "sentence_order_label")
_DISCRIMINATORS = ("ElectraForPreTraining", "FunnelForPreTraining")
"""They tell tokens that were replaced: a label of 0 or 1 for each that the mask shows. The mean over all that are shown ignores
-100, so that rows of unequal lengths make another mean in each microbatch: rows are full."""
_CHOICES = 2
_SIDE = 64
"""Of an image for a net of convolutions, which takes any."""
_AS_LONG = ("FSMT",)
"""Their decoders read the input's ids, so that the labels are as long."""
_PLACES = ("start_positions", "end_positions")


def labels_are_ids(model: nn.Module) -> bool:
    """True if a row's tokens can be its labels: a class of language models."""
    name = type(model).__name__
    return "labels" in _labels_of(model) and not _has_one_per_row(name) and "TokenClassification" not in name


def _labels_of(model: nn.Module) -> list[str]:
    """Names of its forward; a forward that only takes `**kwargs` may take labels."""
    names: list[str] = find_labels(type(model))
    return names or ["labels"]


def _has_one_per_row(name: str) -> bool:
    return any(word in name for word in _PER_ROW)


def _corners(vocabulary: int) -> list[int]:
    """Ids at which a part of the vocabulary begins or ends, for 2, 4 and 8 ranks: few rows draw none of them by chance."""
    borders = [-(-vocabulary // parts) * part for parts in (2, 4, 8) for part in range(1, parts)]
    found = dict.fromkeys([x for border in borders for x in (border, border - 1)] + [vocabulary - 1])
    return [x for x in found if 0 < x < vocabulary]


def made_up(model: nn.Module, rows: int, seq: int, generator: torch.Generator, first: int) -> Batch:
    """`rows` rows of `seq` tokens, or images. `first`: the number of the first row, among those of all batches."""
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        return _images(model, rows, generator)
    if main != "input_ids":
        raise ModelError(
            f"{type(model).__name__} takes {main}, and such data cannot be made up. Pass --data FILE.jsonl with one "
            "row per line, keys as the model's arguments, with labels"
        )
    if "ForMultipleChoice" not in type(model).__name__:
        batch, corner = _tokens(model, rows, seq, generator, first)
        return {**batch, **_labels(model, batch, corner, generator)}
    batch, corner = _tokens(model, rows * _CHOICES, seq, generator, first * _CHOICES)
    choices = {name: x.view(rows, _CHOICES, -1) for name, x in batch.items()}
    return {**choices, "labels": _draw(_CHOICES, generator, rows)}


def _draw(high: int, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Without 0, which often pads, where there is a choice."""
    return torch.randint(0 if high < 3 else 1, high, shape, generator=generator)


def _vocabulary(config: object) -> int:
    """Of the tokens; Canine's are any characters."""
    return int(field(text_config(config), "vocab_size", 128))


def _images(model: nn.Module, rows: int, generator: torch.Generator) -> Batch:
    config: Any = model.config
    vision = field(config, "vision_config", config)
    size = field(vision, "image_size", _SIDE)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    images = torch.randn(rows, field(vision, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": images, "labels": _draw(config.num_labels, generator, rows)}


def _tokens(
    model: nn.Module, rows: int, seq: int, generator: torch.Generator, first: int
) -> tuple[Batch, torch.Tensor]:
    """(ids and their mask, the id of a border in each row, which is its second token)."""
    config: object = model.config
    vocabulary = _vocabulary(config)
    most = field(config, "max_position_embeddings", 0)
    seq = min(seq, most) if most > 0 else seq  # XLNet's is -1
    ids = _draw(vocabulary, generator, rows, seq)
    corners = _corners(vocabulary)
    corner = torch.tensor([corners[(first + row) % len(corners)] for row in range(rows)]) if corners else ids[:, 1]
    ids[:, 1] = corner
    # Each fourth batch has no padding: transformers gives attention no mask then, and other kernels run.
    is_full = type(model).__name__ in _DISCRIMINATORS or first // rows % 4 == 1
    lengths = torch.randint(seq if is_full else max(3, seq // 2), seq + 1, (rows, 1), generator=generator)
    mask = (torch.arange(seq)[None] < lengths).long()
    end = getattr(config, "eos_token_id", None)
    if field(config, "is_encoder_decoder", False) and _has_one_per_row(type(model).__name__) and isinstance(end, int):
        ids[ids == end] = 1 if end != 1 else 2  # they look for the end of a sentence, the same number in each row
        ids[torch.arange(rows), lengths[:, 0] - 1] = end
    return {"input_ids": ids * mask, "attention_mask": mask}, corner


def _labels(model: nn.Module, batch: Batch, corner: torch.Tensor, generator: torch.Generator) -> Batch:
    """Every label that the forward names and that has a known meaning."""
    config: Any = model.config
    ids, mask = batch["input_ids"], batch["attention_mask"]
    rows, seq = ids.shape
    name, takes = type(model).__name__, _labels_of(model)
    found = {each: _draw(2, generator, rows) for each in _TWO_WAYS if each in takes}
    if _PLACES[0] in takes:
        start = torch.randint(0, max(1, seq // 2), (rows,), generator=generator)
        return {**found, _PLACES[0]: start, _PLACES[1]: start + 1}
    if "labels" not in takes:
        return found
    if _has_one_per_row(name):
        return {**found, "labels": _draw(config.num_labels, generator, rows)}
    hidden = torch.rand(rows, seq, generator=generator) < 0.25
    if found:  # a sum of means over tokens and over rows is that of one batch only if the rows have as many labels each
        hidden = torch.arange(seq)[None] >= max(3, seq // 2)
    if name in _DISCRIMINATORS:
        return {**found, "labels": _draw(2, generator, rows, seq)}
    if "TokenClassification" in name:
        labels = _draw(config.num_labels, generator, rows, seq)
        return {**found, "labels": labels.masked_fill(hidden | (mask == 0), IGNORED)}
    if field(config, "is_encoder_decoder", False):
        length = seq if name.startswith(_AS_LONG) else max(2, seq // 2)
        labels = _draw(_vocabulary(config), generator, rows, length)
        labels[:, 1] = corner
        return {**found, "labels": labels}
    labels = ids.masked_fill(hidden | (mask == 0), IGNORED)
    labels[:, 1] = ids[:, 1]
    return {**found, "labels": labels}
