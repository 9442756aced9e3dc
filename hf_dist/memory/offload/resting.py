"""One interface for 1-D tensors that rest on the device, on the host or on disk.

    fetch     start to bring the tensor into memory     a no-op if it stays in memory
    get       the elements, after they have arrived
    release   they are no longer needed, or changed     a changed tensor on disk is written in the background
    wait      wait until the tensor is where it rests

Users of a state make the same four calls for every tier; the tier is chosen once, when the state is created.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch


class Tier(Enum):
    """A kind of memory: device, host or disk."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Sliceable(Protocol):
    """The read interface of a state: implemented by tensors, and by tensors on disk, which read only accessed elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that slicing returns."""

    def numel(self) -> int:
        """Number of elements."""

    def __getitem__(self, interval: slice) -> torch.Tensor:
        """The elements of `interval`, 1-D: a view if they are in memory, else a copy."""

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """An interval (dim is 0), not read yet."""

    def detach(self) -> object:
        """The same elements without an autograd graph."""

    def clone(self) -> torch.Tensor:
        """A copy of all elements."""


class Resting(Protocol):
    """One 1-D tensor that rests on some tier. Local to the process; none of the calls communicates."""

    tier: Tier
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its tier, including padding."""

    @property
    def elements(self) -> Any:
        """The tensor itself if it stays in memory, else an object that reads a requested interval."""

    def part(self, start: int, stop: int) -> Sliceable:
        """Elements [start, stop), read only on access."""

    def fetch(self) -> None:
        """Start to bring it into memory; idempotent."""

    def get(self, *, blank: bool = False) -> torch.Tensor:
        """The elements, valid until `release`. `blank`: do not read them, as all will be written."""

    def release(self, *, changed: bool = False, after: Sequence[object] = ()) -> None:
        """Free the memory. `changed`: store the current elements. `after`: CUDA events to wait for before reuse."""

    def wait(self) -> None:
        """Wait for a write that `release` started."""


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
        """A view of elements [start, stop)."""
        return self.tensor[start:stop]

    def fetch(self) -> None:
        """Do nothing: the tensor is in memory."""

    def get(self, *, blank: bool = False) -> torch.Tensor:
        """The tensor."""
        return self.tensor

    def release(self, *, changed: bool = False, after: Sequence[object] = ()) -> None:
        """Do nothing: the tensor stays in memory."""

    def wait(self) -> None:
        """Do nothing: the tensor is where it rests."""


@contextmanager
def opened(resting: Resting, *, changed: bool = False) -> Iterator[torch.Tensor]:
    """The elements of `resting` inside the block; `changed`: store what the block writes. Local."""
    values = resting.get()
    try:
        yield values
    finally:
        resting.release(changed=changed)
        resting.wait()
