"""The data files next to DCP's metadata, in DCP's own format: written without copies, read by byte range.

torch's `FileSystemReader` reads what `Writer` writes. Source of the format: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.futures import Future
from torch.utils.serialization import config

from hf_dist.checkpoint.dcp_metadata import read_metadata
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.folder import start_writeback
from hf_dist.errors import CheckpointError

__all__ = ["Reader", "Writer", "without_neighbours"]

_BUFFER, _STEP = 2**18, 16 * 2**20


def without_neighbours(values: torch.Tensor) -> torch.Tensor:
    """The same 1-D memory as a tensor with its own storage, because `torch.save` writes whole storages and DCP clones views."""
    if values.device.type != "cpu":
        return values
    return torch.from_numpy(values.detach().view(torch.uint8).numpy()).view(values.dtype)


class Writer(dcp.FileSystemWriter):
    """DCP's writer without its checksum, which nothing reads; it starts writing to disk with the first bytes."""

    def __init__(self, folder: Path, sums: FileSums) -> None:
        """`sums`: adds up the bytes of files, by their names below `folder`."""
        super().__init__(folder, overwrite=False)
        self.fs = _Files(folder, sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """As DCP's."""
        with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
            return super().write_data(plan, planner)


class _Files(FileSystem):
    def __init__(self, folder: Path, sums: FileSums) -> None:
        super().__init__()
        self._folder, self._sums = folder, sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with io.FileIO(path, mode) as stream:
                yield stream
            return
        # `torch.save` makes some forty writes of a few bytes around each tensor; the tensor itself bypasses the buffer.
        name = str(Path(path).relative_to(self._folder))
        with io.BufferedWriter(_Stream(path, mode, name, self._sums), _BUFFER) as buffered:
            yield buffered


class _Stream(io.FileIO):
    """Starts writeback right after each write, so that the flush at the end finds little left. Written from start to end."""

    def __init__(self, path: str | os.PathLike[str], mode: str, name: str, sums: FileSums) -> None:
        super().__init__(path, mode)
        self._name, self._sums = name, sums
        self._end = self._announced = 0

    def write(self, data: Any) -> int:
        """As in any raw stream, returns how many bytes of `data` were written."""
        part = memoryview(data)[:_STEP]
        count = 0
        with self._sums.beside(self._name, self._end, part):
            while count < len(part):
                count += super().write(part[count:])
        self._end += count
        if self._end - self._announced >= _STEP:
            start_writeback(self.fileno(), self._announced, self._end - self._announced)
            self._announced = self._end
        return count


class Reader(dcp.FileSystemReader):
    """DCP's reader that reads metadata by `read_metadata`, and only the needed part of a stored block."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The metadata: which tensors are stored where."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, in file order."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                for item in sorted(items, key=lambda i: self.storage_data[i.storage_index].offset):
                    self._read_item(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            raise CheckpointError(
                f"{item.storage_index.fqn} in {self.path} is a pickled object; only tensors are read from it"
            )
        info = self.storage_data[item.storage_index]
        # On "meta" torch reads only the description; its storage records the byte offset.
        described = torch.load(self._part(file, info), map_location="meta", weights_only=True)
        stored = described
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != stored.size():
            raise CheckpointError(
                f"{item.storage_index.fqn} in {self.path} has {tuple(stored.shape)}, not {tuple(target.shape)}"
            )
        begin = getattr(described.untyped_storage(), "_checkpoint_offset", None)
        if begin is None or not stored.is_contiguous():
            whole = torch.load(self._part(file, info), map_location="cpu", weights_only=True)
            target.copy_(whole.as_strided(stored.size(), stored.stride(), stored.storage_offset()))
        elif stored.numel():
            offset = info.offset + begin + stored.storage_offset() * stored.element_size()
            straight = target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous()
            into = target if straight else torch.empty(stored.shape, dtype=stored.dtype)
            _fill(file, offset, into, f"{self.path}: {item.storage_index.fqn}")
            if not straight:
                target.copy_(into)
        planner.commit_tensor(item, target)

    def _part(self, file: io.FileIO, info: Any) -> BinaryIO:
        if info.transform_descriptors:
            raise CheckpointError(f"{self.path} is compressed or encrypted ({', '.join(info.transform_descriptors)})")
        return cast(BinaryIO, self._slice_file(file, info))


def _fill(file: io.FileIO, offset: int, into: torch.Tensor, what: str) -> None:
    left = into.reshape(-1).view(torch.uint8).numpy().data
    file.seek(offset)
    while left:
        count = file.readinto(left)
        if not count:
            raise CheckpointError(f"{what}: the file ends {len(left)} bytes too early")
        left = left[count:]
