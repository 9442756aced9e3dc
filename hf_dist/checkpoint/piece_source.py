"""A parameter whose elements are pieces of stored tensors. Any interval is read, and only the bytes it needs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from safetensors import safe_open

from hf_dist.checkpoint.pieces import Piece
from hf_dist.checkpoint.provenance import sliced
from hf_dist.checkpoint.safetensors_source import FileTensor
from hf_dist.sharding.lazy import CHUNK_NUMEL
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["PieceSource"]

GAP = 64 * 2**10
"""Gaps of up to this many bytes between two runs in a file are read and discarded instead of skipped."""


class PieceSource:
    """The `WeightSource` over pieces of tensors in files."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[FileTensor, Piece]]) -> None:
        """`parts` cover the parameter once. Their pieces have the parameter's elements as sources, the tensor's as targets."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self._parts = sorted(parts, key=lambda part: part[1].offset)

    @classmethod
    def whole(cls, tensor: FileTensor) -> PieceSource:
        """A whole stored tensor, unchanged."""
        return cls(tensor.shape, tensor.dtype, [(tensor, Piece.whole(tensor.name, tensor.numel))])

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `WeightSource`."""
        for tensor, piece in self._parts:
            for inside in piece.within(start, stop):
                for box in _readable(inside.merged(), tensor.dtype.itemsize):
                    self._read_box(tensor, box, out[box.offset - start : box.stop - start])

    def _read_box(self, tensor: FileTensor, box: Piece, out: torch.Tensor) -> None:
        """`out`: 1-D, from the first to the last element of the box."""
        first, numel = box.target_offset, box.flipped().stop - box.target_offset
        straight = numel == out.numel() == box.numel and box.run_numel == numel
        if straight and tensor.dtype == self.dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous():
            tensor.read(first, first + numel, out)
            return
        stored = torch.empty(numel, dtype=tensor.dtype)
        tensor.read(first, first + numel, stored)
        values = stored.as_strided(box.sizes, box.target_strides).to(self.dtype)
        out.as_strided(box.sizes, [stride * out.stride(0) for stride in box.strides]).copy_(values)

    def fingerprint(self) -> str:
        """See `WeightSource`."""
        rows = [f"{tensor.describe()}{piece}" for tensor, piece in self._parts]
        return hashlib.sha256(f"{self.shape}{self.dtype}{rows}".encode()).hexdigest()[:16]

    def sample(self, indices: list[int]) -> torch.Tensor:
        """See `WeightSource`. Through safetensors' own reader."""
        values = torch.empty(len(indices), dtype=self.dtype)
        found = {k: self._locate(index) for k, index in enumerate(indices)}
        for file in {tensor.file for tensor, _ in found.values()}:
            # Closed at once, because touched pages of a mapping, and their neighbours, count as memory until then.
            with safe_open(file.path, framework="pt") as f:
                for k, (tensor, at) in found.items():
                    if tensor.file is file:
                        values[k] = tensor.element(f, at)
        return values

    def _locate(self, index: int) -> tuple[FileTensor, int]:
        """The stored tensor and its element that hold element `index` of the parameter."""
        return next((tensor, at) for tensor, piece in self._parts if (at := piece.target_of(index)) is not None)

    def sliced(self, held: TensorSlice) -> PieceSource:
        """See `WeightSource`."""
        found = sliced([piece for _, piece in self._parts], held)
        return PieceSource(held.shape, self.dtype, [(self._parts[number][0], piece) for number, piece in found])


def _readable(box: Piece, itemsize: int) -> Iterator[Piece]:
    """The box in parts that are read in one piece each: short, and mostly wanted elements between their ends."""
    span = box.flipped().stop - box.target_offset
    whole = box.run_numel == box.numel  # elements that are neighbours on both sides
    dim = max(range(len(box.sizes)), key=lambda d: box.target_strides[d] * (box.sizes[d] > 1))
    size, stride = box.sizes[dim], box.target_strides[dim]
    rest = span - (size - 1) * stride
    if size > 1 and (stride - rest) * itemsize > GAP:
        step = 1
    elif span > CHUNK_NUMEL and not whole:
        step = max(1, CHUNK_NUMEL // stride)
    else:
        step = size
    if step >= size:
        yield from _chunks(box) if whole else (box,)
        return
    for first in range(0, size, step):
        yield from _readable(box.cut(dim, first, min(first + step, size)).merged(), itemsize)


def _chunks(box: Piece) -> Iterator[Piece]:
    edges = [*range(0, box.numel, CHUNK_NUMEL), box.numel]
    return (box.cut(0, a, b) for a, b in itertools.pairwise(edges))
