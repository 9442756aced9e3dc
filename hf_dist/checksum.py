"""A number that depends on every bit of a tensor and on its place; equal bits give equal numbers, wherever they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["batch_digest", "checksum"]

_WORDS = 1 << 16
"""Words of 8 bytes at a time: what is computed on the way stays in the cache."""
_MIX, _NEXT = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D  # odd; products wrap around at 2^64
_AFTER = 1_000_003


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """0-D int64 on the tensor's device, which the host does not wait for. Exact: nothing is rounded.

    Every word is multiplied by a weight of its place: exchanged values do not cancel out, as they do in a sum. Strides and
    alignment play no part.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    weights = _weights(min(_WORDS, -(-raw.numel() // 8)), raw.device)
    for part in raw.split(8 * _WORDS):
        rest = -part.numel() % 8
        if rest:
            part = torch.cat([part, part.new_zeros(rest)])
        elif part.data_ptr() % 8 or part.storage_offset() % 8:
            part = part.clone()
        words = part.view(torch.int64)
        own = weights[: words.numel()]
        # The upper half once more by itself: round floats differ in so high bits that a product may lose them.
        total = total * _NEXT + _dot(words, own) + _dot(words >> 32, own) * _MIX
    return total


def batch_digest(batch: Any) -> torch.Tensor:
    """A whole number in float64 that differs when any element of the tensors in `batch` does; where the tensors are."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in (t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)):
        own = checksum(tensor)
        total = total.to(own.device) * _AFTER + own
    return (total & (1 << 52) - 1).double()  # as many bits as travel unrounded


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a, b) if a.device.type == "cpu" else (a * b).sum()  # CUDA has no product of integers


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """(count,) odd numbers that look random, the same everywhere. Not kept: made faster than used."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1
