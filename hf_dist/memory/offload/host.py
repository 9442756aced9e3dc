"""Host memory: page-locked if possible, with copies to and from the device that overlap computation, and threads for steps.

On a machine without an accelerator, host and device are the same memory; the same calls are then plain copies.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_dist.dist.host_info import processors
from hf_dist.format_bytes import size_text
from hf_dist.log import say_once, warn_once
from hf_dist.tensors.hugepages import fresh_pages, not_in_children

_CHUNK_NUMEL = 1 << 22
"""Elements that are cast on the host and sent to the device at a time."""


def host_empty(nbytes: int, *, pin: bool) -> torch.Tensor:
    """An uninitialised 1-D uint8 host tensor that starts on a page; page-locked if `pin` and the system allows it.

    Registers ordinary memory instead of using torch's pinned allocator, which rounds sizes up to powers of two. A page-locked
    tensor is not there in processes that are forked later.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    buffer = fresh_pages(nbytes)
    if pin and torch.cuda.is_available():
        _register(buffer)
    return buffer


def host_empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised host tensor of the same shape, dtype and (if dense) strides; page-locked if `tensor` is on a GPU."""
    like = torch.empty_like(tensor, device="meta", requires_grad=False)
    buffer = host_empty(like.numel() * like.element_size(), pin=tensor.is_cuda)
    return buffer.view(like.dtype).as_strided(like.size(), like.stride())


def host_zeros(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """A 1-D host tensor of zeros."""
    return host_empty(numel * dtype.itemsize, pin=pin).zero_().view(dtype)


def _register(buffer: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    if int(runtime.cudaHostRegister(address, buffer.numel(), 0)) != 0:
        _forget_error(runtime)
        warn_once(
            f"the system refused to page-lock {size_text(buffer.numel())} of host memory (see `ulimit -l`): copies to and "
            'from the device cannot overlap computation. Set "pin_memory": false to use ordinary memory.'
        )
        return
    not_in_children(buffer)
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


def _forget_error(runtime: object) -> None:
    """Clear the CUDA runtime's last error: otherwise the next kernel launch would report the refusal as its own failure."""
    take = getattr(runtime, "cudaGetLastError", None)  # only in some versions of torch
    if take is None and (library := _loaded_runtime()) is not None:
        take = library.cudaGetLastError
    if take is not None:
        take()


def _loaded_runtime() -> Any:
    """The CUDA runtime library that torch has loaded; another copy would have its own last error. None if not found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    path = next((line.split(maxsplit=5)[-1] for line in lines if "/libcudart" in line), None)
    return None if path is None else ctypes.CDLL(path)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, for work issued after this call. Copies from host to GPU go through page-locked memory: a copy from
    ordinary memory would make the host wait until the GPU has finished all earlier work.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def brought(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy `tensor` to the host; the returned function waits for this copy only and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event()

    def get() -> torch.Tensor:
        event.synchronize()
        return copy

    return get


class HostLink:
    """Copies between host and device, in order, with a separate stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._to_host: Any = torch.cuda.Stream(device) if on_gpu else None
        self._to_device: Any = torch.cuda.Stream(device) if on_gpu else None
        self._aside: Any = None
        self._in_use: deque[tuple[Any, torch.Tensor]] = deque()
        self._staging: deque[tuple[torch.Tensor, Any]] = deque()

    @contextmanager
    def beside(self, host: torch.Tensor, *, to_host: bool = False) -> Iterator[list[object]]:
        """Work issued inside runs after all earlier work of the device and concurrently with later work.

        Yields a list that contains, after the block, the event to wait for. A no-op if `host` is the device's own memory.
        """
        arrival: list[object] = []
        stream = self._to_host if to_host else self._to_device
        if stream is None or host.is_cuda:
            yield arrival
            return
        with self._in(stream, arrival):
            yield arrival

    @contextmanager
    def aside(self) -> Iterator[list[object]]:
        """As `beside`, for work of the device itself: what it waits for inside does not hold back the device's later work."""
        arrival: list[object] = []
        if self.device.type != "cuda":
            yield arrival
            return
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)
        with self._in(self._aside, arrival):
            yield arrival

    @contextmanager
    def _in(self, stream: Any, arrival: list[object]) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
            arrival.append(stream.record_event())

    def collect(
        self, into: torch.Tensor, values: torch.Tensor, *, add: bool, norm: torch.Tensor | None = None
    ) -> list[object]:
        """Copy (or add) `values` to `into` (host, 1-D). The device computes the sum and its L2 `norm` (0D fp32).

        Returns the events after which `into` can be read; `wait_host` waits for all such copies.
        """
        with self.beside(into, to_host=True) as arrival:
            if add and not values.is_cuda:
                into.add_(values)
            else:
                total = into.to(values.device, non_blocking=True).add_(values) if add else values
                if norm is not None:
                    torch.linalg.vector_norm(total, dtype=torch.float32, out=norm)
                into.copy_(total, non_blocking=True)
        self._hold(arrival, values)
        return arrival

    def _hold(self, arrival: list[object], values: torch.Tensor) -> None:
        """Keep `values` alive until the stream has finished with their memory."""
        for event in arrival:
            self._in_use.append((event, values))
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def deliver(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Cast `values` into `into`; one of them is on the host. Before reading `into`, call `wait_device` (or `wait_host`)."""
        if not into.is_cuda and values.is_cuda and self._to_host is not None:
            with self.beside(into, to_host=True) as arrival:
                into.copy_(values, non_blocking=True)
            self._hold(arrival, values)
            self._to_device.wait_stream(self._to_host)  # the next call may send it back
            return
        if not into.is_cuda or values.is_cuda:
            into.copy_(values)
            return
        for start in range(0, values.numel(), _CHUNK_NUMEL):
            piece = values[start : start + _CHUNK_NUMEL]
            buffer = self._take_staging()
            staging = buffer[: piece.numel() * into.element_size()].view(into.dtype)
            staging.copy_(piece)
            with self.beside(staging) as arrival:
                into[start : start + piece.numel()].copy_(staging, non_blocking=True)
            self._staging.append((buffer, arrival[0]))

    def _take_staging(self) -> torch.Tensor:
        """One of two buffers, after its previous transfer has arrived."""
        if len(self._staging) < 2:
            return host_empty(_CHUNK_NUMEL * 4, pin=True)
        buffer, event = self._staging.popleft()
        event.synchronize()
        return buffer

    def wait_host(self) -> None:
        """Block until all collected tensors can be read on the host. Transfers to the device continue."""
        if self._to_host is not None:
            self._to_host.synchronize()
            self._in_use.clear()

    def wait_device(self) -> None:
        """Make later work of the device wait for all deliveries and collections so far."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)


class Gradient:
    """The reduced gradient of a window, on the device."""

    host_nbytes = 0
    """Bytes of host memory kept between windows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.values: torch.Tensor | None = None  # 1D, None before the first part of a window

    def add(self, reduced: torch.Tensor) -> None:
        """Add `reduced` to the gradient, or take it over as the first part."""
        if self.values is None:
            self.values = reduced.to(self.dtype)
        else:
            self.values.add_(reduced)

    def on_device(self) -> torch.Tensor:
        """The values on the device, for collectives to read and write."""
        assert self.values is not None
        return self.values

    def replace(self, values: torch.Tensor) -> None:
        """Set new values, on the device, as changed after `on_device`."""
        self.values = values

    def norm(self) -> torch.Tensor | None:
        """L2 norm of `values`, 0D fp32 on the device, if it is known without reading them; else None. Local."""
        return None

    def wait(self) -> None:
        """Block until the optimizer step can read `values`."""

    def drop(self) -> None:
        """Drop the values at the end of the window."""
        self.values = None


class HostGradient(Gradient):
    """A reduced gradient in host memory that is kept between windows; transfers to it overlap the backward."""

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink, *, pin: bool) -> None:
        super().__init__(dtype)
        self._home = host_zeros(numel, dtype, pin=pin)
        self._link = link
        self._arrival: list[Any] = []
        self._norm: torch.Tensor | None = None  # of the last collected values, computed on the device
        self._version = -1  # of the values at that time: a later write increases it
        self.host_nbytes = numel * dtype.itemsize

    def wait(self) -> None:
        """Block until the last copy has arrived."""
        for event in self._arrival:
            event.synchronize()

    def norm(self) -> torch.Tensor | None:
        """On a GPU, the norm computed while the values passed through the device; None if they were written since."""
        return self._norm if self._home._version == self._version else None

    def add(self, reduced: torch.Tensor) -> None:
        """Copy `reduced` to the host, or add it to the values there."""
        self._collect(reduced, add=self.values is not None)
        self.values = self._home

    def _collect(self, values: torch.Tensor, *, add: bool) -> None:
        if values.is_cuda and self._norm is None:  # allocated once and reused
            self._norm = torch.empty((), device=values.device)
        self._arrival = self._link.collect(self._home, values, add=add, norm=self._norm)
        self._version = self._home._version

    def on_device(self) -> torch.Tensor:
        """A copy of the values on the device, or the values themselves if host and device are the same memory."""
        self._link.wait_host()
        return self._home.to(self._link.device)

    def replace(self, values: torch.Tensor) -> None:
        """Copy `values` to the host."""
        if values is not self._home:
            self._collect(values, add=False)


def step_threads(ranks_on_machine: int) -> int:
    """Threads for an optimizer step on the CPU: this rank's share of the machine's cores, limited to those it may use."""
    return max(1, min(processors(), (os.cpu_count() or 1) // ranks_on_machine))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Make torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    say_once(f"offloaded optimizer state is stepped with {count} threads per rank ({before} elsewhere)")
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
