"""One bit an element: its sign, with the mean of the block's magnitudes as scale.

Alone it changes numbers beyond use; with error feedback it serves optimizers that send momentum (`optim/`).
Source: 1-bit Adam (Tang et al. 2021, arXiv 2102.02888).
"""

from __future__ import annotations

import torch

from hf_dist.tensors.codecs.codec import Codec

__all__ = ["Signs"]


class Signs(Codec):
    """An eighth of a byte an element: bit k of byte j is the sign of element k * block / 8 + j; zero counts as positive."""

    name = "signs"
    bits = 1

    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec.pack`."""
        eighths = (blocks >= 0).to(torch.uint8).unflatten(-1, (8, -1))
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=blocks.device)
        return blocks.abs().mean(-1), (eighths * weights.unsqueeze(-1)).sum(-2, dtype=torch.uint8)

    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """See `Codec.unpack`."""
        shifts = torch.arange(8, dtype=torch.uint8, device=payload.device).unsqueeze(-1)
        bits = (payload.unsqueeze(-2) >> shifts) & 1
        return (bits.flatten(-2).float() * 2 - 1).mul_(scales.unsqueeze(-1))

    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """The element's or the mean magnitude."""
        mean = blocks.abs().mean(-1, keepdim=True)
        return torch.maximum(blocks.abs(), mean) * (1 + 2.0**-18)
