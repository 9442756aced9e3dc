"""The wire codec: how a flat interval of numbers becomes bytes for a link, and numbers again.

Elements are encoded in blocks. A block's bytes depend on its elements alone, so ranks that cut the same numbers at blocks
get the same bytes, and one process that calls `rounded` has the numbers that many ranks receive.

    row on the wire    scales, 4 bytes a block | elements, block * bits / 8 bytes a block

A block with an element that is not finite comes out with no finite element: what is wrong is not hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from hf_dist.tensors.one_kernel import one_kernel

__all__ = ["SCALE_NBYTES", "SMALLEST_SCALE", "Codec"]

SCALE_NBYTES = 4
"""Bytes of a block's scale, in fp32."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Below it fp32 has no normal numbers, and a division by the scale could overflow."""
_CHUNK_BLOCKS_NUMEL = 1 << 16
"""Elements that a processor handles at a time, so that what is between two operators stays in its cache."""
_SENDERS = 8
"""Messages that a GPU adds up in one kernel; more would make it long to compile."""


class Codec(ABC):
    """One way to send numbers. Without state: what a message has left out is kept by `Residual` (`dist/coded.py`)."""

    name: ClassVar[str]
    """Its name in the config."""
    bits: ClassVar[int]
    """Bits of an element on the wire."""

    def __init__(self, block: int) -> None:
        """`block`: elements that share a scale, a positive multiple of 64."""
        assert block > 0 and block % 64 == 0, block
        self.block = block

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.block == getattr(other, "block", None)

    def __hash__(self) -> int:
        return hash((self.name, self.block))

    def __repr__(self) -> str:
        return f"{self.name} in blocks of {self.block}"

    @property
    def _payload(self) -> int:
        return self.block * self.bits // 8

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements on the wire; the last block is sent whole."""
        return -(-numel // self.block) * (self._payload + SCALE_NBYTES)

    @torch.no_grad()
    def encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        """Fill `wire` (uint8, (rows, nbytes(n))) from `values` ((rows, n), any floating dtype). Local."""
        blocks = self._blocks(values)
        for part, scales, payload in self._parts(blocks, wire):
            scale, packed = one_kernel(self._packed, part)
            scales.copy_(scale)
            payload.copy_(packed)

    @torch.no_grad()
    def decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Fill `out` ((rows, n), any floating dtype) from `wire` (uint8, (rows, nbytes(n))); or add to it. Local."""
        whole = out.shape[-1] % self.block == 0
        blocks = out.view(len(out), -1, self.block) if whole else self._blocks(out)
        for part, scales, payload in self._parts(blocks, wire):
            one_kernel(self._unpacked, part, scales, payload, add)
        if not whole:
            out.copy_(blocks.view(len(out), -1)[:, : out.shape[-1]])

    @torch.no_grad()
    def decode_sum(self, wires: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """Fill `out` ((rows, n), any floating dtype) with the sum of what arrives of `wires` (uint8, (senders, rows,
        nbytes(n))), added in fp32 in their order, times `factor`. Local."""
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        number, left = divmod(out.shape[-1], self.block)
        if _in_chunks(out) or left:
            for sender, wire in enumerate(wires):
                self.decode(wire, total, add=sender > 0)
            if factor != 1.0:
                total.mul_(factor)
        else:
            scales = wires[..., : SCALE_NBYTES * number].view(torch.float32)
            payload = wires[..., SCALE_NBYTES * number :].unflatten(-1, (number, self._payload))
            blocks = total.view(len(out), number, self.block)
            for first in range(0, len(wires), _SENDERS):
                some = slice(first, first + _SENDERS)
                one = factor if some.stop >= len(wires) else 1.0
                one_kernel(self._summed, blocks, scales[some], payload[some], first > 0, one)
        if total is not out:
            out.copy_(total)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What arrives of `values` (1-D, any floating dtype), in their dtype: a new tensor. Local."""
        wire = torch.empty(1, self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        out = torch.empty_like(values)
        self.encode(values.view(1, -1), wire)
        self.decode(wire, out.view(1, -1))
        return out

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """The most by which each element of `values` (1-D, finite) changes on its way, in fp32. Local."""
        blocks = self._blocks(values.view(1, -1)).float()
        return self.block_bound(blocks).reshape(-1)[: values.numel()]

    @abstractmethod
    def pack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales, uint8 of the elements) of `blocks` (fp32, (..., block)). `torch.compile` fuses its operators to one pass."""

    @abstractmethod
    def unpack(self, scales: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """The elements, fp32 (..., block), of `scales` (...) and `payload` (uint8, (..., block * bits / 8))."""

    @abstractmethod
    def block_bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """`bound` of the elements of `blocks` (fp32, (..., block))."""

    def _packed(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pack(blocks.float())

    def _unpacked(self, into: torch.Tensor, scales: torch.Tensor, payload: torch.Tensor, add: bool) -> None:
        values = self.unpack(scales, payload)
        into.add_(values) if add else into.copy_(values)

    def _summed(
        self, into: torch.Tensor, scales: torch.Tensor, payload: torch.Tensor, add: bool, factor: float
    ) -> None:
        """`into` becomes (itself, if `add`, and) the sum over the first dimension, times `factor`."""
        parts = [self.unpack(*one) for one in zip(scales, payload, strict=True)]
        total = into + parts[0] if add else parts[0]
        for part in parts[1:]:
            total = total + part
        into.copy_(total * factor if factor != 1.0 else total)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (rows, n) as (rows, blocks, block): a view, or a copy with zeros behind the elements."""
        missing = -values.shape[-1] % self.block
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.reshape(len(values), -1, self.block)

    def _parts(self, blocks: torch.Tensor, wire: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(blocks, their scales, their elements on the wire), chunk by chunk on a processor, else at once."""
        rows, number, _ = blocks.shape
        scales = wire[:, : SCALE_NBYTES * number].view(torch.float32)
        payload = wire[:, SCALE_NBYTES * number :].view(rows, number, self._payload)
        if not _in_chunks(blocks):
            return [(blocks, scales, payload)]
        most = max(1, _CHUNK_BLOCKS_NUMEL // self.block)
        return [
            (blocks[row, first : first + most], scales[row, first : first + most], payload[row, first : first + most])
            for row in range(rows)
            for first in range(0, number, most)
        ]


def _in_chunks(tensor: torch.Tensor) -> bool:
    """Whether it is handled chunk by chunk, in the cache of a processor."""
    return tensor.device.type == "cpu"
