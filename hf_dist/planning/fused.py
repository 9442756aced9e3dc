"""Bytes that all kernels but products move, if what lies between two products runs as one kernel.

`torch.compile` of a block does so, and so do Transformer Engine and hand-written kernels. An operation waits until a product
reads its result. All that the product waits for is one kernel: it reads each tensor of other kernels once, and writes what the
product reads, and once what later kernels read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

__all__ = ["FusedKernels"]


@dataclass(eq=False)
class _Result:
    """A storage as an operation left it."""

    nbytes: int
    inputs: tuple[_Result, ...] = ()
    kernel: int | None = None
    """Number of the kernel that made it; None while it waits; 0 for what products make, or nothing that was counted."""
    written: bool = False
    readers: set[int] = field(default_factory=set)
    """Kernels that have read it."""


class FusedKernels:
    """Counts while operations run in order. `number` names the storage of a tensor."""

    def __init__(self, number: Callable[[torch.Tensor], int]) -> None:
        self._number = number
        self._results: dict[int, _Result] = {}
        self._last = 0

    def waits(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """An operation that is no product."""
        read = tuple(map(self._of, inputs))
        for tensor in outputs:
            self._results[self._number(tensor)] = _Result(_nbytes(tensor), read)

    def product(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor] = ()) -> int:
        """A product, or the end of a block, which reads `inputs`. Returns the bytes moved by the kernel that it waits for."""
        self._last += 1
        moved = 0
        for result in map(self._of, inputs):
            moved += self._run(result) + self._write(result)
        for tensor in outputs:
            self._results[self._number(tensor)] = _made(tensor)
        return moved

    def _run(self, wanted: _Result) -> int:
        """Run all that waits for `wanted`, and return the bytes that are read, and written for it by other kernels."""
        moved, left = 0, [wanted]
        while left:
            result = left.pop()
            if result.kernel is not None:
                continue
            result.kernel = self._last
            for given in result.inputs:
                if given.kernel is None:
                    left.append(given)
                elif given.kernel != self._last and self._last not in given.readers:
                    given.readers.add(self._last)
                    moved += self._write(given) + given.nbytes
            result.inputs = ()
        return moved

    @staticmethod
    def _write(result: _Result) -> int:
        """Bytes of a result that leaves its kernel; once."""
        if result.written:
            return 0
        result.written = True
        return result.nbytes

    def _of(self, tensor: torch.Tensor) -> _Result:
        return self._results.setdefault(self._number(tensor), _made(tensor))


def _made(tensor: torch.Tensor) -> _Result:
    return _Result(_nbytes(tensor), kernel=0, written=True)


def _nbytes(tensor: torch.Tensor) -> int:
    """Stored bytes: an expanded tensor counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
