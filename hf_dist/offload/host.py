"""Host memory: page-locked where that is possible, copies to and from the device beside its computation, threads to step with.

On a machine without an accelerator host and device are the same memory. The same calls are made, and are plain copies.
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

from hf_dist.log import say_once, warn_once
from hf_dist.pages import fresh_pages
from hf_dist.sizes import size_text

_CHUNK_NUMEL = 1 << 22
"""Elements of one piece of what is cast on the host and sent to the device."""


def host_empty(nbytes: int, *, pin: bool) -> torch.Tensor:
    """1-D uint8 on the host, not initialised, beginning on a page; page-locked if `pin` and the system allows it.

    Ordinary memory is registered rather than asked of torch's pinned allocator, which rounds sizes up to powers of two.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    buffer = fresh_pages(nbytes)
    if pin and torch.cuda.is_available():
        _register(buffer)
    return buffer


def host_zeros(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """1-D, zeros, on the host."""
    return host_empty(numel * dtype.itemsize, pin=pin).zero_().view(dtype)


def _register(buffer: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    if int(runtime.cudaHostRegister(address, buffer.numel(), 0)) != 0:
        _forget_error(runtime)
        warn_once(
            f"the system refused to page-lock {size_text(buffer.numel())} of host memory (see `ulimit -l`): copies to and "
            'from the device wait for it. "pin_memory": false asks for none.'
        )
        return
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


def _forget_error(runtime: Any) -> None:
    """A refusal stays the runtime's last error, and the next kernel of anybody would be told to have failed with it."""
    take = getattr(runtime, "cudaGetLastError", None)  # torch has it in some versions
    if take is None and (library := _loaded_runtime()) is not None:
        take = library.cudaGetLastError
    if take is not None:
        take()


def _loaded_runtime() -> Any:
    """The CUDA runtime that torch has loaded, not another of this name: each has its own last error. None if none is found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    path = next((line.split(maxsplit=5)[-1] for line in lines if "/libcudart" in line), None)
    return None if path is None else ctypes.CDLL(path)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, for what the device is given next. From the host to a GPU by way of page-locked memory: a copy from
    other memory makes the host wait until the GPU is done with all that it was given before.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def brought(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy `tensor` to the host; what is returned waits for the copy alone, and gives it."""
    if not tensor.is_cuda:
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event()

    def get() -> torch.Tensor:
        event.synchronize()
        return copy

    return get


class HostLink:
    """Copies between host and device, each direction on a stream of its own and in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._to_host: Any = torch.cuda.Stream(device) if on_gpu else None
        self._to_device: Any = torch.cuda.Stream(device) if on_gpu else None
        self._in_use: deque[tuple[Any, torch.Tensor]] = deque()
        self._staging: deque[tuple[torch.Tensor, Any]] = deque()

    @contextmanager
    def beside(self, host: torch.Tensor, *, to_host: bool = False) -> Iterator[list[Any]]:
        """What is issued inside runs after what the device was given so far, beside what it is given next.

        Yields a list that holds, after the block, what to wait for. Nothing changes if `host` is the device's own memory.
        """
        arrival: list[Any] = []
        stream = self._to_host if to_host else self._to_device
        if stream is None or host.is_cuda:
            yield arrival
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield arrival
            arrival.append(stream.record_event())

    def collect(
        self, into: torch.Tensor, values: torch.Tensor, *, add: bool, norm: torch.Tensor | None = None
    ) -> list[Any]:
        """Copy (or add) `values` to `into` (host, 1-D). The sum is made on the device, and so is its L2 `norm` (0D fp32).

        Returns the events after which it can be read; `wait_host` waits for everything.
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

    def _hold(self, arrival: list[Any], values: torch.Tensor) -> None:
        """The memory of `values` must not be used again before the stream is through with it."""
        for event in arrival:
            self._in_use.append((event, values))
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def deliver(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Cast `values` into `into`, one of them on the host; before `into` is read there `wait_device`, or `wait_host`."""
        if not into.is_cuda and values.is_cuda and self._to_host is not None:
            with self.beside(into, to_host=True):
                into.copy_(values, non_blocking=True)
            self._to_device.wait_stream(self._to_host)  # which may send it back as the next thing
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
        """One of two buffers, when what was sent from it has arrived."""
        if len(self._staging) < 2:
            return host_empty(_CHUNK_NUMEL * 4, pin=True)
        buffer, event = self._staging.popleft()
        event.synchronize()
        return buffer

    def wait_host(self) -> None:
        """Block until what was collected can be read on the host. What is on its way to the device goes on."""
        if self._to_host is not None:
            self._to_host.synchronize()
            self._in_use.clear()

    def wait_device(self) -> None:
        """Let what the device is given from now on come after what was delivered and collected."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)


class Gradient:
    """The reduced gradient of a window, on the device."""

    host_nbytes = 0
    """Bytes of host memory that are kept all the time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.values: torch.Tensor | None = None  # 1D, None before the first part of a window

    def add(self, reduced: torch.Tensor) -> None:
        """Take over `reduced`, or add it."""
        if self.values is None:
            self.values = reduced.to(self.dtype)
        else:
            self.values.add_(reduced)

    def on_device(self) -> torch.Tensor:
        """The values, where collectives can read and write them."""
        assert self.values is not None
        return self.values

    def replace(self, values: torch.Tensor) -> None:
        """New values, from `on_device`."""
        self.values = values

    def norm(self) -> torch.Tensor | None:
        """L2 norm of `values`, 0D fp32 on the device, if it is known without reading them. Local."""
        return None

    def wait(self) -> None:
        """Block until `values` can be read by who steps them."""

    def drop(self) -> None:
        """The window is over."""
        self.values = None


class HostGradient(Gradient):
    """The same in host memory that is kept for the next window; it arrives while backward goes on."""

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink, *, pin: bool) -> None:
        super().__init__(dtype)
        self._home = host_zeros(numel, dtype, pin=pin)
        self._link = link
        self._arrival: list[Any] = []
        self._norm: torch.Tensor | None = None  # of what went to the host last, made on the way
        self._version = -1  # of the values then: whoever writes into them makes another one
        self.host_nbytes = numel * dtype.itemsize

    def wait(self) -> None:
        """Until the last copy has arrived."""
        for event in self._arrival:
            event.synchronize()

    def norm(self) -> torch.Tensor | None:
        """On a GPU the values pass through the device before they rest, where reading them costs nothing."""
        return self._norm if self._home._version == self._version else None

    def add(self, reduced: torch.Tensor) -> None:
        """Copy `reduced` to the host, or add it there."""
        self._collect(reduced, add=self.values is not None)
        self.values = self._home

    def _collect(self, values: torch.Tensor, *, add: bool) -> None:
        if values.is_cuda and self._norm is None:  # kept: the next one is written while this one may be read
            self._norm = torch.empty((), device=values.device)
        self._arrival = self._link.collect(self._home, values, add=add, norm=self._norm)
        self._version = self._home._version

    def on_device(self) -> torch.Tensor:
        """A copy on the device; the values themselves where that is the same memory."""
        self._link.wait_host()
        return self._home.to(self._link.device)

    def replace(self, values: torch.Tensor) -> None:
        """Copy them to the host."""
        if values is not self._home:
            self._collect(values, add=False)


def step_threads(ranks_on_machine: int) -> int:
    """Threads for a step on the CPU: the machine's cores shared by its ranks, not more than this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(allowed, (os.cpu_count() or 1) // ranks_on_machine))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch uses `count` threads inside the block, and as many as before after it."""
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
