"""Counts samples and real tokens in the inputs of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_dist.model_config import text_config

IGNORED_LABEL = -100


class TokenCounter:
    """Counts the model's training inputs. Counts stay on the inputs' device until `read`, so no microbatch waits."""

    def __init__(self, config: object) -> None:
        text = text_config(config)
        pad, end = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
        ends = end if isinstance(end, (list, tuple)) else [end]
        # If padding and end of text are one token, the ends of real texts would be mistaken for padding.
        self._pad = None if pad in ends else pad
        self._has_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self._samples = 0
        self._counts: torch.Tensor | None = None

    def add(self, inputs: Mapping[str, object]) -> None:
        """Count the keyword arguments of one forward; each row is a sample."""
        self._samples += _num_rows(inputs)
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor):
            return
        counts = self._count(ids, inputs).detach()
        self._counts = counts if self._counts is None else self._counts + counts

    def _count(self, ids: torch.Tensor, inputs: Mapping[str, object]) -> torch.Tensor:
        mask, positions, labels = (inputs.get(name) for name in ("attention_mask", "position_ids", "labels"))
        masked = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        real: Any
        if masked:
            real = mask != 0
        else:
            real = torch.ones_like(ids, dtype=torch.bool) if self._pad is None else ids != self._pad
        tokens = real.sum()
        if not masked and isinstance(positions, torch.Tensor) and positions.shape == ids.shape:
            # Several packed texts, each with positions from 0: 1 + 3 + 5 + ... is the square of a text's length.
            pairs = ((2 * positions + 1) * real).sum()
        else:
            pairs = real.sum(-1).square().sum()
        if self._has_decoder and isinstance(labels, torch.Tensor):
            tokens = tokens + (labels != IGNORED_LABEL).sum()
        return torch.stack([tokens, pairs])  # int64

    def read(self) -> tuple[int, int, int]:
        """(samples, tokens, query-key pairs) since the last read."""
        samples, counts, self._samples, self._counts = self._samples, self._counts, 0, None
        tokens, pairs = (0, 0) if counts is None else counts.tolist()
        return samples, tokens, pairs


def _num_rows(inputs: Mapping[str, object]) -> int:
    # Named ones first: some vision models flatten the patches of all images into the first dimension of pixel_values.
    named = [inputs.get(name) for name in ("input_ids", "inputs_embeds", "labels")]
    for value in [*named, *inputs.values()]:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    return 0
