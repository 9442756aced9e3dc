"""Which elements of a replica's shards belong to which rank of a server. Pure arithmetic.

A server's rank keeps some rows of every parameter, whatever the layouts of its replicas:

    parameter [6, 4] on a server of two ranks     rows 0-2 on rank 0, rows 3-5 on rank 1
    a replica's rank with elements [5, 21)        a Cell for each rank and box of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_dist.tensors.tensor_slice import Box, TensorSlice

__all__ = ["Cell", "cells_for", "rows_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """A box of a whole parameter, and where a flat buffer has it."""

    name: str
    whole: Shape
    """Shape of the parameter."""
    offsets: Shape
    sizes: Shape
    at: int
    """Index of its first element in the buffer."""
    strides: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The box in a 1-D buffer."""
        return buffer.as_strided(self.sizes, self.strides, buffer.storage_offset() + self.at)

    @property
    def described(self) -> list[object]:
        """Name, shape, offsets and sizes, for a message."""
        return [self.name, list(self.whole), list(self.offsets), list(self.sizes)]


def rows_of(whole: Sequence[int], server: int, servers: int) -> tuple[int, int]:
    """The rows [first, last) of a parameter that a rank of the server keeps; a number counts as one row."""
    rows = whole[0] if whole else 1
    return rows * server // servers, rows * (server + 1) // servers


def cells_for(name: str, held: TensorSlice, start: int, stop: int, at: int, servers: int) -> Iterator[tuple[int, Cell]]:
    """(rank of the server, cell) for elements [start, stop) of the flattened slice `held`; `at`: where a buffer has `start`."""
    for box in held.boxes(start, stop):
        for server in range(servers):
            first, last = rows_of(held.whole, server, servers)
            part = _within(box, first, last)
            if part is not None:
                yield server, Cell(name, held.whole, part.offsets, part.sizes, at + part.start - start, part.strides)


def _within(box: Box, first: int, last: int) -> Box | None:
    """The part of a box within rows [first, last); None if there is none."""
    if not box.numel:
        return None
    if not box.sizes:
        return box if first < last else None
    low, high = max(box.offsets[0], first), min(box.offsets[0] + box.sizes[0], last)
    if low >= high:
        return None
    start = box.start + (low - box.offsets[0]) * box.strides[0]
    return Box((low, *box.offsets[1:]), (high - low, *box.sizes[1:]), start, box.strides)
