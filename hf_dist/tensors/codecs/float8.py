"""Floating point of 8 bits (4 of exponent, 3 of mantissa), with a scale per block.

    scale = max |x| / 448        element = x / scale, rounded to nearest

Small elements of a block keep three bits, where integers lose them. Source: Micikevicius et al. 2022 (arXiv 2209.05433).
"""

from __future__ import annotations

import torch

from hf_dist.tensors.codecs.codec import SMALLEST_SCALE, Codec

__all__ = ["Float8"]

_MOST = 448.0
_SMALLEST_STEP = 2.0**-9


class Float8(Codec):
    """One byte an element."""

    name = "fp8_e4m3"
    bits = 8

    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec.pack`."""
        scale = (blocks.abs().amax(-1) / _MOST).clamp_(min=SMALLEST_SCALE)
        scaled = blocks / scale.unsqueeze(-1)
        return scale, scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """See `Codec.unpack`."""
        return payload.view(torch.float8_e4m3fn).float().mul_(scales.unsqueeze(-1))

    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """Half a step at the element's exponent, or of the smallest exponent."""
        scale = (blocks.abs().amax(-1) / _MOST).clamp_(min=SMALLEST_SCALE).unsqueeze(-1)
        return torch.maximum(blocks.abs() * 2.0**-4, scale * (_SMALLEST_STEP / 2)) * (1 + 2.0**-18)
