"""Tensors of a forward that are kept in host memory until their backward.

On a GPU, a side stream copies them to pinned memory while the next blocks compute, and back one tensor ahead of its use.
Elsewhere, the same steps are plain copies. No `record_stream` is needed: a device tensor that the side stream reads is kept
until the compute stream has waited for the copy, and one that it writes is allocated on the compute stream.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from hf_dist.memory.offload.host import host_empty_like

NUM_KEPT = 2
"""Number of latest tensors that also stay on the device: their copies may still be running, and backward uses them first."""


@dataclass(eq=False)
class HostCopy:
    """One tensor in host memory. Its buffer returns to `pool` when autograd drops the copy."""

    host: torch.Tensor
    pool: list[torch.Tensor]
    device: torch.device
    stored: torch.Event | None = None
    """Event after the copy to the host; None if copies are synchronous."""
    source: torch.Tensor | None = None
    """The tensor itself, if among the latest `NUM_KEPT`."""
    fetched: torch.Tensor | None = None
    """The tensor being copied back to the device."""
    arrived: torch.Event | None = None
    previous: weakref.ref[HostCopy] | None = field(default=None, repr=False)
    """The copy stored before this one, which backward uses next."""

    def __del__(self) -> None:
        # The next write to this buffer uses the same side stream, so it runs after the last read.
        self.pool.append(self.host)


class HostCopies:
    """`put` in forward, `get` in backward. One per model; buffers are reused."""

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        self._latest: deque[weakref.ref[HostCopy]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.nbytes = 0
        """Bytes of all buffers allocated so far."""

    @torch.no_grad()
    def put(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy `tensor` to the host."""
        pool = self._pools[tensor.size(), tensor.stride(), tensor.dtype]
        host = pool.pop() if pool else self._buffer(tensor)
        copy = HostCopy(host, pool, tensor.device, source=tensor.detach())
        stream = self._stream(tensor.device)
        if stream is None:
            host.copy_(tensor)
        else:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
                copy.stored = stream.record_event()
        copy.previous = self._latest[-1] if self._latest else None
        self._latest.append(weakref.ref(copy))
        if len(self._latest) > NUM_KEPT:
            _let_go(self._latest.popleft()())
        return copy

    @torch.no_grad()
    def get(self, copy: HostCopy) -> torch.Tensor:
        """The tensor on its device; starts to fetch the previous copy meanwhile."""
        tensor = copy.source
        if tensor is None:
            self._fetch(copy)
            tensor, copy.fetched = copy.fetched, None
            if copy.arrived is not None:
                torch.cuda.current_stream(copy.device).wait_event(copy.arrived)
        previous = copy.previous() if copy.previous is not None else None
        if previous is not None and previous.source is None:
            self._fetch(previous)
        assert tensor is not None
        return tensor

    def _fetch(self, copy: HostCopy) -> None:
        if copy.fetched is not None:
            return
        copy.fetched = torch.empty_like(copy.host, device=copy.device, pin_memory=False)
        stream = self._stream(copy.device)
        if stream is None:
            copy.fetched.copy_(copy.host)
            return
        stream.wait_stream(torch.cuda.current_stream(copy.device))  # which may still be using the allocated memory
        with torch.cuda.stream(stream):
            copy.fetched.copy_(copy.host, non_blocking=True)
            copy.arrived = stream.record_event()

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes += tensor.numel() * tensor.element_size()
        return host_empty_like(tensor)

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _let_go(copy: HostCopy | None) -> None:
    """Free the device tensor of a copy after making the compute stream wait until the side stream has read it."""
    if copy is None:
        return
    if copy.stored is not None:
        torch.cuda.current_stream(copy.device).wait_event(copy.stored)
    copy.source = None
