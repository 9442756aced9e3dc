"""Floating point of 8 bits (4 of exponent, 3 of mantissa), with a scale per block.

    scale = max |x| / 448        element = x / scale, rounded to nearest

Small elements of a block keep three bits, where integers lose them. Source: Micikevicius et al. 2022 (arXiv 2209.05433).
"""

from __future__ import annotations

import torch

from hf_dist.tensors.codecs.codec import SMALLEST_SCALE, Codec

__all__ = ["Float8", "Float8Products"]

_MOST = 448.0
_SMALLEST_STEP = 2.0**-9
_EXPONENT, _NEXT = 0x7F800000, 0x00800000
"""Of fp32 as bits: the exponent, and one more of it."""


class Float8(Codec):
    """One byte an element."""

    name = "fp8_e4m3"
    bits = 8

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """One for each of `blocks` (fp32, (..., block)): it makes the largest element the largest number of the format."""
        return (blocks.abs().amax(-1) / _MOST).clamp_(min=SMALLEST_SCALE)

    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec.pack`."""
        scale = self.scales(blocks)
        scaled = blocks / scale.unsqueeze(-1)
        return scale, scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """See `Codec.unpack`."""
        return payload.view(torch.float8_e4m3fn).float().mul_(scales.unsqueeze(-1))

    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """Half a step at the element's exponent, or of the smallest exponent."""
        scale = self.scales(blocks).unsqueeze(-1)
        return torch.maximum(blocks.abs() * 2.0**-4, scale * (_SMALLEST_STEP / 2)) * (1 + 2.0**-18)


class Float8Products(Float8):
    """The same with scales that are powers of two: digits stay as they are, so products in float8 with such scales round what
    arrives to the numbers that they would have made of the original (but for elements below 2^-13 of the largest)."""

    name = "fp8_products"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """One for each block: the smallest power of two with which no element is too large."""
        bits = super().scales(blocks).view(torch.int32)
        exponent = bits & _EXPONENT
        stays = (bits == exponent) | (exponent == _EXPONENT)  # powers of two; inf and NaN, which must be seen
        return torch.where(stays, bits, exponent + _NEXT).view(torch.float32)
