"""Batches cut to a length, for a curriculum of growing sequence lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

__all__ = ["cut_batches"]

_OF_TOKENS = ("input_ids", "attention_mask", "labels")
"""Names, or name endings, of tensors whose second axis is the sequence length."""


def cut_batches(batches: Iterator[object], length: int) -> Iterator[object]:
    """The same batches with at most `length` tokens per row. Reads one batch for each one requested."""
    for batch in batches:
        yield _cut(batch, length)


def _cut(batch: object, length: int) -> object:
    """A batch cut to `length` along every axis that is as long as its rows of tokens."""
    if not isinstance(batch, Mapping):
        return batch
    lengths = {
        value.shape[1]
        for key, value in batch.items()
        if key.endswith(_OF_TOKENS) and torch.is_tensor(value) and value.dim() > 1 and value.shape[1] > length
    }
    # The first axis holds rows; their number may equal a length by chance.
    cut = {
        key: _narrowed(value, lengths, length) if torch.is_tensor(value) and value.dim() > 1 else value
        for key, value in batch.items()
    }
    return type(batch)(cut)  # type: ignore[call-arg]


def _narrowed(tensor: torch.Tensor, lengths: set[int], length: int) -> torch.Tensor:
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] in lengths:
            tensor = tensor.narrow(dim, 0, length)
    return tensor.contiguous()
