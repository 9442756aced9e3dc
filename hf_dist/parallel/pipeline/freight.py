"""What the tensors between two stages become on the wire: their bytes, or for hidden states those of a wire codec.

    hidden state     the first floating tensor, and those with as many dims and as long a last one (encoder states)
    sent as it is    all others: integers, position biases, router logits; a hidden state that would have more bytes encoded

The vector of each token begins a block, so what is rounded does not depend on how tokens are divided among ranks and batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_dist.parallel.pipeline.probe import TensorSpec
from hf_dist.tensors.checksum import as_bytes
from hf_dist.tensors.codecs import Codec

__all__ = ["Freight"]


class Freight:
    """Tensors as bytes and back, for both ends of a channel, which know the same specs."""

    def __init__(self, codec: Codec | None = None) -> None:
        """`codec`: of hidden states and their gradients; None: all tensors are sent as they are."""
        self.codec = codec

    def nbytes(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Bytes of each tensor on the wire. Pure."""
        encoded = self._encoded(specs)
        return [self._encoded_nbytes(s) if e else _nbytes(s) for s, e in zip(specs, encoded, strict=True)]

    @torch.no_grad()
    def packed(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The bytes of each tensor, 1-D uint8 on its device. The tensors do not change. Local; the host waits for nothing."""
        encoded = self._encoded(specs)
        return [self._encode(t) if e else as_bytes(t) for t, e in zip(tensors, encoded, strict=True)]

    @torch.no_grad()
    def unpacked(self, wires: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The tensors whose bytes arrived, without gradient. Local; the host waits for nothing."""
        encoded = self._encoded(specs)
        return [
            self._decode(wire, spec) if is_encoded else wire.view(spec.dtype).view(spec.shape)
            for wire, spec, is_encoded in zip(wires, specs, encoded, strict=True)
        ]

    def _encoded(self, specs: Sequence[TensorSpec]) -> list[bool]:
        first = next((s for s in specs if s.dtype.is_floating_point and s.shape), None)
        if self.codec is None or first is None:
            return [False] * len(specs)
        kind = (first.dtype, len(first.shape), first.shape[-1])
        return [
            (s.dtype, len(s.shape), s.shape[-1] if s.shape else 0) == kind and self._encoded_nbytes(s) < _nbytes(s)
            for s in specs
        ]

    def _encoded_nbytes(self, spec: TensorSpec) -> int:
        assert self.codec is not None
        return math.prod(spec.shape[:-1]) * self.codec.nbytes(spec.shape[-1])

    def _encode(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.codec is not None
        missing = -tensor.shape[-1] % self.codec.block
        values = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
        values = values.reshape(1, -1)  # a block has elements of one token, so all tokens are encoded as one row
        wire = torch.empty(1, self.codec.nbytes(values.numel()), dtype=torch.uint8, device=tensor.device)
        self.codec.encode(values, wire)
        return wire.view(-1)

    def _decode(self, wire: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        assert self.codec is not None
        *outer, width = spec.shape
        padded = -(-width // self.codec.block) * self.codec.block
        out = torch.empty(*outer, padded, dtype=spec.dtype, device=wire.device)
        self.codec.decode(wire.view(1, -1), out.view(1, -1))
        return out if padded == width else out[..., :width].contiguous()


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
