"""Tensors that rest in a file: a thread pool issues aligned requests, directly to the disk if the file system allows it.

There is one file per rank and kind of state. It is unlinked as soon as it is open, so its space is freed when the process
ends for any reason (on NFS, the client keeps a `.nfs...` name until then).
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import ConfigError, HfDistError, Problem
from hf_dist.format_bytes import size_text
from hf_dist.log import say_once
from hf_dist.memory.offload.host import host_empty
from hf_dist.memory.offload.resting import Tier
from hf_dist.tensors.hugepages import PAGE

_PROBE_NBYTES = 32 << 20
_PREFIX = "hf_dist_swap_rank"
MAX_THREADS = 32
"""Upper bound of requests in flight: each takes a thread."""


class SwapFile:
    """An unnamed file in a folder chosen by the user, read and written in blocks by a few threads."""

    def __init__(self, path: str, folder: Path, *, block_nbytes: int, num_requests: int, rank: int = 0) -> None:
        """`path`: JSON path of `folder`, for messages. `block_nbytes`: size of a request. `num_requests`: requests in flight.

        Raises `ConfigError` if the folder cannot be written.
        """
        self.path = path
        self.folder = folder
        self.block_nbytes = max(PAGE, -(-block_nbytes // PAGE) * PAGE)
        self.nbytes = 0
        self._fd, self.direct = _open_unnamed(path, folder, rank)
        self._threads = ThreadPoolExecutor(max(1, min(num_requests, MAX_THREADS)), thread_name_prefix="hf_dist swap")
        weakref.finalize(self, _close, self._fd, self._threads)
        if not self.direct:
            say_once(f"{path}: {folder} has no direct access (O_DIRECT): reads and writes go through the page cache")

    def allocate(self, nbytes: int) -> int:
        """Reserve `nbytes`, a multiple of a page, that read as zeros; returns their offset. Raises `ConfigError` if full."""
        offset = self.nbytes
        try:
            if nbytes:
                os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                os.ftruncate(self._fd, offset + nbytes)
            else:
                raise ConfigError(no_space(self.path, self.folder, offset + nbytes, str(error.strerror))) from error
        self.nbytes += nbytes
        return offset

    def read(self, buffer: torch.Tensor, offset: int) -> Transfer:
        """Start to fill `buffer` (uint8, page-aligned, whole pages) from `offset` on."""
        return self._transfer(self._read_block, buffer, offset)

    def write(self, buffer: torch.Tensor, offset: int) -> Transfer:
        """Start to write `buffer` at `offset`; do not change it before waiting for the transfer."""
        return self._transfer(self._write_block, buffer, offset)

    def _transfer(self, act: Callable[[memoryview, int], None], buffer: torch.Tensor, offset: int) -> Transfer:
        data = buffer.numpy().data
        starts = range(0, len(data), self.block_nbytes)
        blocks = [self._threads.submit(act, data[s : s + self.block_nbytes], offset + s) for s in starts]
        return Transfer(blocks, self.folder)

    def _read_block(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.preadv(self._fd, [data], offset)
            if not count:
                raise OSError(errno.EIO, "the file ends too early")
            data, offset = data[count:], offset + count

    def _write_block(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwritev(self._fd, [data], offset)
            data, offset = data[count:], offset + count

    def measure(self) -> tuple[float, float]:
        """(bytes per second read, bytes per second written), from a short trial in temporary space. Local."""
        buffer = host_empty(_PROBE_NBYTES, pin=False).zero_()
        seconds = []
        for act in (self.write, self.read):
            start = time.perf_counter()
            act(buffer, self.nbytes).wait()
            seconds.append(time.perf_counter() - start)
        os.ftruncate(self._fd, self.nbytes)
        return _PROBE_NBYTES / seconds[1], _PROBE_NBYTES / seconds[0]


class Transfer:
    """Requests in flight."""

    def __init__(self, blocks: list[Future[None]], folder: Path) -> None:
        self._blocks = blocks
        self._folder = folder

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(block.done() for block in self._blocks)

    def wait(self) -> None:
        """Wait until all requests are complete. Raises `HfDistError` if one failed."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            try:
                block.result()
            except OSError as error:
                raise HfDistError(
                    f"swapping to {self._folder} failed: {error}. Resume from the last checkpoint."
                ) from error


class BufferPool:
    """Reusable host buffers for transfers."""

    def __init__(self, count: int, *, pin: bool) -> None:
        """`count`: number of buffers; more are made only if more tensors are in use at once."""
        self.count = count
        self.pin = pin
        self.nbytes = 0
        """Bytes of all buffers, in use or free."""
        self._made = 0
        self._free: list[tuple[torch.Tensor, Sequence[object]]] = []  # (buffer, CUDA events before its next use)
        self._written: deque[tuple[Transfer, torch.Tensor]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 buffer of at least `nbytes`, which must be whole pages. May wait for a running write."""
        while self._written and (self._written[0][0].done or (self._made >= self.count and not self._free)):
            transfer, buffer = self._written.popleft()
            transfer.wait()
            self.give(buffer)
        fitting = [k for k, (buffer, _) in enumerate(self._free) if buffer.numel() >= nbytes]
        if fitting:
            buffer, after = self._free.pop(min(fitting, key=lambda k: self._free[k][0].numel()))
            _wait(after)
            return buffer
        if self._free:  # all free buffers are too small: replace one by a larger one
            buffer, after = self._free.pop()
            _wait(after)
            self.nbytes -= buffer.numel()
            self._made -= 1
        self.nbytes += nbytes
        self._made += 1
        return host_empty(nbytes, pin=self.pin)

    def give(self, buffer: torch.Tensor, after: Sequence[object] = ()) -> None:
        """Return `buffer` to the pool; it can be taken again after the events `after`."""
        self._free.append((buffer, after))

    def give_written(self, buffer: torch.Tensor, transfer: Transfer) -> None:
        """Return `buffer` to the pool; it can be taken again once `transfer` has written it."""
        self._written.append((transfer, buffer))


def disk_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `numel` elements take on disk: whole pages."""
    return -(-numel * dtype.itemsize // PAGE) * PAGE


class DiskTensor:
    """A 1-D tensor that rests in a `SwapFile` and occupies a buffer of a `BufferPool` while it is used."""

    tier = Tier.DISK

    def __init__(self, file: SwapFile, pool: BufferPool, numel: int, dtype: torch.dtype) -> None:
        """Allocate `numel` zeros on disk. Raises `ConfigError` if the disk is full."""
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._numel = numel
        self._file = file
        self._pool = pool
        self.nbytes = disk_nbytes(numel, dtype)
        self._offset = file.allocate(self.nbytes)
        self._buffer: torch.Tensor | None = None
        self._reading: Transfer | None = None
        self._writing: Transfer | None = None

    def numel(self) -> int:
        """Number of elements."""
        return self._numel

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def elements(self) -> DiskTensor:
        """Itself; slicing it reads from disk."""
        return self

    def part(self, start: int, stop: int) -> DiskPart:
        """Elements [start, stop), read only on access."""
        return DiskPart(self, start, stop)

    def fetch(self) -> None:
        """Start to read the elements into a buffer; idempotent."""
        if self._buffer is None:
            self.wait()
            self._buffer = self._pool.take(self.nbytes)
            self._reading = self._file.read(self._buffer[: self.nbytes], self._offset)

    def get(self, *, blank: bool = False) -> torch.Tensor:
        """The elements in host memory, valid until `release`. `blank`: do not read them, as all will be written."""
        if self._buffer is None and blank:
            self.wait()
            self._buffer = self._pool.take(self.nbytes)
        self.fetch()
        assert self._buffer is not None
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self._buffer[: self._numel * self.dtype.itemsize].view(self.dtype)

    def release(self, *, changed: bool = False, after: Sequence[object] = ()) -> None:
        """Start to write changed elements, or return the buffer to the pool at once."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if changed:
            self._writing = self._file.write(buffer[: self.nbytes], self._offset)
            self._pool.give_written(buffer, self._writing)
        else:
            self._pool.give(buffer, after)

    def wait(self) -> None:
        """Wait until the last write is complete."""
        if self._writing is not None:
            self._writing.wait()
            self._writing = None

    def __getitem__(self, which: slice | torch.Tensor) -> torch.Tensor:
        """A copy of an interval, or of single elements given by a 1-D tensor of indices."""
        if isinstance(which, torch.Tensor):
            return torch.cat([self[i : i + 1] for i in which.tolist()])
        start, stop, _ = which.indices(self._numel)
        if self._buffer is not None:
            return self.get()[start:stop].clone()
        self.wait()
        size = self.dtype.itemsize
        first, last = start * size // PAGE * PAGE, -(-stop * size // PAGE) * PAGE
        buffer = host_empty(max(0, last - first), pin=False)
        self._file.read(buffer, self._offset + first).wait()
        return buffer[start * size - first : stop * size - first].view(self.dtype)


class DiskPart:
    """An interval of a `DiskTensor`, of which only accessed elements are read."""

    def __init__(self, whole: DiskTensor, start: int, stop: int) -> None:
        self.whole = whole
        self.start = start
        self.stop = stop
        self.dtype = whole.dtype
        self.device = whole.device

    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def narrow(self, dim: int, start: int, length: int) -> DiskPart:
        """A sub-interval, like `torch.Tensor.narrow` (dim is 0)."""
        return DiskPart(self.whole, self.start + start, self.start + start + length)

    def detach(self) -> DiskPart:
        """Itself: it has no autograd graph."""
        return self

    def clone(self) -> torch.Tensor:
        """All elements, read now."""
        return self[:]

    def __getitem__(self, interval: slice) -> torch.Tensor:
        """The elements of this interval of the part, read now."""
        first, last, _ = interval.indices(self.numel())
        return self.whole[self.start + first : self.start + max(first, last)]


def no_space(path: str, folder: Path, nbytes: int, reason: str = "") -> Problem:
    """The `Problem` for a disk that is too small."""
    free = free_nbytes(folder)
    because = f" ({reason})" if reason else ""
    return Problem(
        path,
        repr(str(folder)),
        f"has room for {size_text(free)}, and {size_text(nbytes)} are needed there{because}",
        'Name another folder, free space, or offload to "cpu".',
    )


def free_nbytes(folder: Path) -> int:
    """Bytes that an unprivileged user can still write below `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _open_unnamed(path: str, folder: Path, rank: int) -> tuple[int, bool]:
    """(descriptor of a new, already unlinked file, whether it bypasses the page cache). Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f"{_PREFIX}{rank}_", dir=folder)
        direct_fd = _open_direct(name)
        os.unlink(name)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError(Problem(path, repr(str(folder)), reason, "Name a folder on a local disk.")) from error
    if direct_fd is None:
        return fd, False
    os.close(fd)
    return direct_fd, True


def _open_direct(name: str) -> int | None:
    """Open the file with O_DIRECT; None if the file system refuses the flag or the first request."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    page = host_empty(PAGE, pin=False).zero_().numpy().data
    try:
        if os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE:
            os.ftruncate(fd, 0)
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _close(fd: int, threads: ThreadPoolExecutor) -> None:
    # Every running request holds a reference to the file, so none is running and there is nothing to wait for. Waiting could
    # deadlock if garbage collection runs in one of these threads.
    threads.shutdown(wait=False)
    os.close(fd)


def _wait(events: Sequence[Any]) -> None:
    for event in events:
        event.synchronize()
