"""A 1-D tensor that rests somewhere and is somewhere else while it is used: one interface for every place.

    fetch     begin to bring it into memory             nothing to do for what stays there
    get       the elements, after they have arrived
    release   they are not needed now, or were changed  what rests on disk is written, beside what follows
    settle    until it is safely where it rests

Whoever uses a state makes the same four calls wherever it rests; the place is chosen once, when the state is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch


class Tier(Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Sliceable(Protocol):
    """What a reader of a state may ask of it: a tensor answers, and so does one on disk, which reads what is asked."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""

    @property
    def device(self) -> torch.device:
        """Of what slicing returns."""

    def numel(self) -> int:
        """Number of elements."""

    def __getitem__(self, interval: slice) -> torch.Tensor:
        """These elements, 1-D: a view of what is in memory, a copy of what is not."""

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """An interval (dim is 0), not read yet."""

    def detach(self) -> Any:
        """The same without a graph."""

    def clone(self) -> torch.Tensor:
        """A copy of all elements."""


class Resting(Protocol):
    """One 1-D tensor and where it rests. Local to the process; none of the calls communicates."""

    tier: Tier
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes where it rests, padding included."""

    @property
    def elements(self) -> Any:
        """The tensor itself where it stays in memory, else something that reads the interval it is asked for."""

    def part(self, start: int, stop: int) -> Sliceable:
        """Elements [start, stop), not read before they are asked for."""

    def fetch(self) -> None:
        """Begin to bring it into memory; idempotent."""

    def get(self, *, blank: bool = False) -> torch.Tensor:
        """The elements, valid until `release`. `blank`: their values do not matter, all will be written."""

    def release(self, *, changed: bool = False, after: Sequence[Any] = ()) -> None:
        """Give the memory back. `changed`: with the elements as they are now. `after`: CUDA events that come first."""

    def settle(self) -> None:
        """Wait for what `release` started."""


class Resident:
    """A tensor that stays in memory: nothing moves."""

    def __init__(self, tensor: torch.Tensor, tier: Tier) -> None:
        self.tensor = tensor
        self.tier = tier
        self.dtype = tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def elements(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor

    def part(self, start: int, stop: int) -> torch.Tensor:
        """A view."""
        return self.tensor[start:stop]

    def fetch(self) -> None:
        """It is here."""

    def get(self, *, blank: bool = False) -> torch.Tensor:
        """The tensor."""
        return self.tensor

    def release(self, *, changed: bool = False, after: Sequence[Any] = ()) -> None:
        """It stays."""

    def settle(self) -> None:
        """It is where it rests."""


@contextmanager
def opened(resting: Resting, *, changed: bool = False) -> Iterator[torch.Tensor]:
    """The elements of `resting` for the length of the block; `changed`: what the block leaves in them is kept."""
    values = resting.get()
    try:
        yield values
    finally:
        resting.release(changed=changed)
        resting.settle()
