"""A checksum that depends on every bit of a tensor and its position, but not on strides or alignment."""

from __future__ import annotations

import torch

from hf_dist.tensors import pytree

__all__ = ["batch_digest", "checksum"]

_WORDS = 1 << 16
"""8-byte words processed at a time, so that intermediate results stay in the cache."""
_MIX, _NEXT = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D  # odd; products wrap around at 2^64
_AFTER = 1_000_003


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements in their order, 1-D; shares memory with a dense tensor.

    torch reports a single element or row of a larger tensor as contiguous whatever its strides, and views no bytes of it.
    """
    flat = tensor.detach().reshape(-1)
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-D int64 on the tensor's device; the host does not wait for it. Exact: nothing is rounded.

    Each word is multiplied by a weight that depends on its position, so swapped values change the result, unlike in a sum.
    Strides and alignment have no effect.
    """
    raw = as_bytes(tensor)
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
        # Count the upper halves again: round floats differ only in high bits, which the product can lose.
        total = total * _NEXT + _dot(words, own) + _dot(words >> 32, own) * _MIX
    return total


def batch_digest(batch: object) -> torch.Tensor:
    """A 0-D float64 integer, on the tensors' device, that differs when any element of the tensors in `batch` differs."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in (t for t in pytree.leaves(batch) if isinstance(t, torch.Tensor)):
        own = checksum(tensor)
        total = total.to(own.device) * _AFTER + own
    return (total & (1 << 52) - 1).double()  # as many bits as float64 holds exactly


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a, b) if a.device.type == "cpu" else (a * b).sum()  # CUDA has no product of integers


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """(count,) pseudo-random odd numbers, the same on every machine. Not cached: making them costs less than using them."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1
