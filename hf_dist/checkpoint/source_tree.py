"""How the elements of a parameter come from tensors in files: joined, cut, permuted, cast. Pure arithmetic.

    gate_up_proj [E, 2I, H] = Join dim 1 ( Join dim 0 (gate_proj of expert 0, 1, ...), Join dim 0 (up_proj ...) )

A node answers for an interval of its flattened elements by asking its parts for intervals of theirs, down to byte ranges of
files. Only a permutation needs more than it is asked for: whole blocks of the dimensions that it mixes.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from typing import Protocol

import torch
from safetensors import safe_open

from hf_dist.boxes import TensorSlice
from hf_dist.checkpoint.safetensors_source import FileTensor
from hf_dist.sharding.lazy import CHUNK_NUMEL


class Node(Protocol):
    """Elements of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    """Elements of an aligned block that is read in one piece, 1 where any interval can be."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, CPU, `dtype`) with the flattened elements [start, stop)."""

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """The stored element that flattened element `index` comes from."""

    def describe(self) -> str:
        """Text that is equal for equal trees over equal data."""


class Leaf:
    """A tensor in a file."""

    block = 1

    def __init__(self, tensor: FileTensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        self.tensor.read(start, stop, out)

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        return self.tensor, index

    def describe(self) -> str:
        """See `Node`."""
        return self.tensor.describe()


class View:
    """The same elements in the same order under another shape."""

    def __init__(self, part: Node, shape: tuple[int, ...]) -> None:
        self.part = part
        self.shape, self.dtype, self.block = shape, part.dtype, part.block

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        self.part.read(start, stop, out)

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        return self.part.leaf(index)

    def describe(self) -> str:
        """See `Node`."""
        return f"view{self.shape}({self.part.describe()})"


class Cast:
    """The same elements rounded to another dtype."""

    def __init__(self, part: Node, dtype: torch.dtype) -> None:
        self.part, self.dtype = part, dtype
        self.shape, self.block = part.shape, part.block

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        for first, last in _chunks(start, stop, self.block):
            stored = torch.empty(last - first, dtype=self.part.dtype)
            self.part.read(first, last, stored)
            out[first - start : last - start].copy_(stored)

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        return self.part.leaf(index)

    def describe(self) -> str:
        """See `Node`."""
        return f"{self.dtype}({self.part.describe()})"


class Join:
    """Tensors one after another along `dim` (`torch.cat`)."""

    def __init__(self, parts: list[Node], dim: int) -> None:
        self.parts, self.dim = parts, dim
        first = parts[0].shape
        self.dtype = parts[0].dtype
        self.shape = (*first[:dim], sum(p.shape[dim] for p in parts), *first[dim + 1 :])
        rest = math.prod(first[dim + 1 :])
        self._rows = [p.shape[dim] * rest for p in parts]  # elements of each part per index of the leading dimensions
        self._ends = list(itertools.accumulate(self._rows))
        self.block = max(p.block for p in parts)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        position = start
        while position < stop:
            k, within = self._find(position)
            count = min(self._rows[k] - within % self._rows[k], stop - position)
            self.parts[k].read(within, within + count, out[position - start : position - start + count])
            position += count

    def _find(self, index: int) -> tuple[int, int]:
        """(part, flattened element of it)"""
        outer, inner = divmod(index, self._ends[-1])
        k = bisect.bisect_right(self._ends, inner)
        return k, outer * self._rows[k] + inner - (self._ends[k] - self._rows[k])

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        k, within = self._find(index)
        return self.parts[k].leaf(within)

    def describe(self) -> str:
        """See `Node`."""
        return f"join{self.dim}({','.join(p.describe() for p in self.parts)})"


class Cut:
    """Indices [first, first + length) of dimension `dim` (`torch.narrow`)."""

    def __init__(self, part: Node, dim: int, first: int, length: int) -> None:
        self.part, self.dim, self.first = part, dim, first
        self.dtype, self.block = part.dtype, part.block
        self.shape = (*part.shape[:dim], length, *part.shape[dim + 1 :])
        rest = math.prod(part.shape[dim + 1 :])
        self._row, self._whole, self._skip = length * rest, part.shape[dim] * rest, first * rest

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        position = start
        while position < stop:
            count = min(self._row - position % self._row, stop - position)
            within = self._find(position)
            self.part.read(within, within + count, out[position - start : position - start + count])
            position += count

    def _find(self, index: int) -> int:
        outer, inner = divmod(index, self._row)
        return outer * self._whole + self._skip + inner

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        return self.part.leaf(self._find(index))

    def describe(self) -> str:
        """See `Node`."""
        return f"cut{self.dim},{self.first},{self.shape}({self.part.describe()})"


class Permute:
    """Dimensions in another order (`torch.permute`); read block by block, a block being what the order mixes."""

    def __init__(self, part: Node, dims: tuple[int, ...]) -> None:
        self.part, self.dims, self.dtype = part, dims, part.dtype
        self.shape = tuple(part.shape[d] for d in dims)
        kept = next((k for k, d in enumerate(dims) if k != d), len(dims))  # leading dimensions that stay in front
        self._kept = kept
        self._mixed = math.prod(self.shape[kept:])
        self.block = math.lcm(max(self._mixed, 1), part.block)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Node`."""
        if stop <= start:
            return
        size = self._mixed
        inner = [d - self._kept for d in self.dims[self._kept :]]
        for block in range(start // size, -(-stop // size)):
            stored = torch.empty(size, dtype=self.dtype)
            self.part.read(block * size, (block + 1) * size, stored)
            flat = stored.view(self.part.shape[self._kept :]).permute(inner).reshape(-1)
            first, last = max(start, block * size), min(stop, (block + 1) * size)
            out[first - start : last - start].copy_(flat[first - block * size : last - block * size])

    def leaf(self, index: int) -> tuple[FileTensor, int]:
        """See `Node`."""
        position = [0] * len(self.dims)
        for size, d in zip(reversed(self.shape), reversed(self.dims), strict=True):
            index, position[d] = divmod(index, size)
        flat = 0
        for size, at in zip(self.part.shape, position, strict=True):
            flat = flat * size + at
        return self.part.leaf(flat)

    def describe(self) -> str:
        """See `Node`."""
        return f"permute{self.dims}({self.part.describe()})"


class TreeSource:
    """The `WeightSource` over a tree."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.shape, self.dtype = node.shape, node.dtype

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See `WeightSource`."""
        if out.dtype == self.dtype and out.device.type == "cpu" and out.is_contiguous():
            self.node.read(start, stop, out)
            return
        for first, last in _chunks(start, stop, self.node.block):
            stored = torch.empty(last - first, dtype=self.dtype)
            self.node.read(first, last, stored)
            out[first - start : last - start].copy_(stored)

    def fingerprint(self) -> str:
        """See `WeightSource`."""
        return hashlib.sha256(self.node.describe().encode()).hexdigest()[:16]

    def sample(self, indices: list[int]) -> torch.Tensor:
        """See `WeightSource`. Through safetensors' own reader."""
        values = torch.empty(len(indices), dtype=self.dtype)
        for k, index in enumerate(indices):
            tensor, at = self.node.leaf(index)
            position = [int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape)] if tensor.shape else []
            # Opened each time: the pages that a mapping has touched, and their neighbours, count until it is closed.
            with safe_open(tensor.file.path, framework="pt") as f:
                element = f.get_slice(tensor.name)[tuple(slice(i, i + 1) for i in position) or ...]
            values[k] = element.reshape(())
        return values

    def sliced(self, held: TensorSlice) -> TreeSource:
        """See `WeightSource`."""
        node = self.node
        for dim, ranges in enumerate(held.ranges):
            if ranges != ((0, held.whole[dim]),):
                cuts: list[Node] = [Cut(node, dim, first, last - first) for first, last in ranges]
                node = cuts[0] if len(cuts) == 1 else Join(cuts, dim)
        return TreeSource(node)


def _chunks(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """[start, stop) in pieces that end at multiples of a few whole blocks."""
    step = max(CHUNK_NUMEL // block, 1) * block
    edges = [start, *range((start // step + 1) * step, stop, step), stop]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]
