"""Reads parts of safetensors files: the header once, then exactly the requested bytes.

No mapping is kept, because pages of a mapped file count as this process's memory until they are dropped. Bytes read with
`pread` stay in the page cache, which all ranks of a machine share.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_dist.checkpoint.safetensors_header import read_header
from hf_dist.checkpoint.weight_plan import TORCH_DTYPES
from hf_dist.errors import CheckpointError

_SPOTS = 16
_SPOT_NBYTES = 64

_bytes_read = 0


def bytes_read() -> int:
    """Bytes of tensors that this process has read through this module so far, without headers."""
    return _bytes_read


class SafetensorsFile:
    """One file. It is opened at the first read and checked to be the file whose header was read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `CheckpointError` if the file does not exist or is not a safetensors file."""
        self.path = Path(path)
        self._descriptor: int | None = None
        try:
            self._stamp = self._now()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read as a safetensors file: {error}") from error
        header = read_header(self.path)
        self._header, self._entries, self._data = header.raw, header.tensors, header.begin

    def _now(self) -> tuple[int, int]:
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns

    def tensors(self) -> dict[str, FileTensor]:
        """Every tensor of the file. Raises `CheckpointError` for a dtype that torch does not have."""
        return {name: FileTensor(self, name, entry) for name, entry in self._entries.items()}

    @cached_property
    def digest(self) -> str:
        """Hash of the header and of a few bytes spread over the data."""
        hashed = hashlib.sha256(self._header)
        last = max(0, self._stamp[0] - self._data - _SPOT_NBYTES)
        for spot in range(_SPOTS):
            piece = torch.zeros(_SPOT_NBYTES, dtype=torch.uint8)
            first = last * spot // (_SPOTS - 1)
            self.read_into(piece[: self._stamp[0] - self._data - first], first, "header")
            hashed.update(piece.numpy().tobytes())
        return hashed.hexdigest()[:16]

    def read_into(self, out: torch.Tensor, offset: int, name: str) -> None:
        """Fill `out` (1-D, uint8, CPU) with data bytes from `offset` on. `name`: the tensor, for the error message."""
        global _bytes_read
        try:
            if self._now() != self._stamp:
                raise CheckpointError(
                    f"{self.path} changed after from_pretrained planned to read it: {name} cannot be loaded. Weights are "
                    "read when the model is prepared; leave the file alone until then, or load the model again."
                )
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._descriptor)
            array: Any = out.numpy()
            view, done = memoryview(array), 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], self._data + offset + done)
                if count == 0:
                    raise CheckpointError(f"{self.path} ends inside {name}: the file is truncated. Download it again.")
                done += count
            _bytes_read += done
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is gone or cannot be read ({error}): {name} cannot be loaded. Weights are read when the "
                "model is prepared; keep the file until then, or load the model again."
            ) from error


class FileTensor:
    """One tensor of one file: the leaf of a `WeightSource`."""

    def __init__(self, file: SafetensorsFile, name: str, entry: dict[str, Any]) -> None:
        if entry["dtype"] not in TORCH_DTYPES:
            raise CheckpointError(f"{file.path}: {name} has dtype {entry['dtype']}, which torch does not have")
        self.file = file
        self.name = name
        self.dtype = TORCH_DTYPES[entry["dtype"]]
        self.shape = tuple(entry["shape"])
        self.numel = math.prod(self.shape)
        self._offset = entry["data_offsets"][0]

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, CPU, the file's dtype) with elements [start, stop)."""
        if stop > start:
            self.file.read_into(out.view(torch.uint8), self._offset + start * self.dtype.itemsize, self.name)

    def element(self, opened: Any, index: int) -> torch.Tensor:
        """One element, 0-D, through safetensors' own reader; `opened`: its file."""
        position = torch.unravel_index(torch.tensor(index), self.shape) if self.shape else ()
        one = tuple(slice(int(i), int(i) + 1) for i in position) or ...
        value: torch.Tensor = opened.get_slice(self.name)[one]
        return value.reshape(())

    def describe(self) -> str:
        """Describes the stored data, independent of the file's path."""
        return f"{self.file.digest}:{self.name}"
