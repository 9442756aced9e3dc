"""Integers of 8 or 4 bits, with a scale per block: symmetric, rounded to nearest.

    scale = max |x| / 127 (or 7)        element = round(x / scale)

Sources: ZeRO++ (Wang et al. 2023, arXiv 2306.10209), section 3; block-wise scales: Dettmers et al. 2021 (arXiv 2110.02861).
"""

from __future__ import annotations

import torch

from hf_dist.tensors.codecs.codec import SMALLEST_SCALE, Codec

__all__ = ["Int4", "Int8"]

_SLACK = 1 + 2.0**-14
"""Scale, division and product are each rounded to fp32, where an element may be 127 steps large."""


def _scales(blocks: torch.Tensor, most: float) -> torch.Tensor:
    # Not divided by a number below the normal ones: an element could come out as inf. NaN stays NaN.
    return (blocks.abs().amax(-1) / most).clamp_(min=SMALLEST_SCALE)


def _bound(blocks: torch.Tensor, most: float) -> torch.Tensor:
    return (_scales(blocks, most) * (0.5 * _SLACK)).unsqueeze(-1).expand_as(blocks)


class Int8(Codec):
    """One byte an element."""

    name = "int8"
    bits = 8

    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec.pack`."""
        scale = _scales(blocks, 127)
        return scale, (blocks / scale.unsqueeze(-1)).round_().to(torch.int8).view(torch.uint8)

    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """See `Codec.unpack`."""
        return payload.view(torch.int8) * scales.unsqueeze(-1)

    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """Half a step of the block."""
        return _bound(blocks, 127)


class Int4(Codec):
    """Half a byte an element: the first half of a block in the low bits, the second half in the high ones."""

    name = "int4"
    bits = 4

    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec.pack`."""
        scale = _scales(blocks, 7)
        low, high = (blocks / scale.unsqueeze(-1)).round_().add_(8).to(torch.uint8).chunk(2, -1)
        return scale, (high << 4).bitwise_or_(low & 15)

    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """See `Codec.unpack`."""
        return (torch.cat([payload & 15, payload >> 4], -1).float() - 8) * scales.unsqueeze(-1)

    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """Half a step of the block."""
        return _bound(blocks, 7)
