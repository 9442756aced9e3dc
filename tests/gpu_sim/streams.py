"""Streams, events and the rest of `torch.cuda` that a training loop touches, written into the trace of a `Recorder`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.gpu_sim.recorder import Recorder
from tests.gpu_sim.trace import COMPUTE, Point

_recorder: Recorder | None = None
_here = threading.local()


def recorder() -> Recorder:
    """That of this process."""
    assert _recorder is not None, "outside of `as_gpu`"
    return _recorder


class Stream:
    """In place of `torch.cuda.Stream`."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        Stream._made += 1
        self.name = name or f"side {Stream._made}"
        self.priority = priority
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = 0 if name == COMPUTE else Stream._made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: Stream) -> None:
        recorder().trace.order(self.name, recorder().trace.point(other.name))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        recorder().host_waits((recorder().trace.point(self.name),), "Stream.synchronize")

    def query(self) -> bool:
        return recorder().is_known((recorder().trace.point(self.name),))


class Event:
    """In place of `torch.cuda.Event`. Nothing is over before the host has waited for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._point = recorder().trace.point((stream or current_stream()).name)

    def wait(self, stream: Stream | None = None) -> None:
        if self._point is not None:
            recorder().trace.order((stream or current_stream()).name, self._point)

    def query(self) -> bool:
        return self._point is None or recorder().is_known((self._point,))

    def synchronize(self) -> None:
        if self._point is not None:
            recorder().host_waits((self._point,), "Event.synchronize")


_COMPUTE = Stream(name=COMPUTE)


def current_stream(device: Any = None) -> Stream:
    """Of this thread."""
    return getattr(_here, "stream", _COMPUTE)


def default_stream(device: Any = None) -> Stream:
    """The one of all threads."""
    return _COMPUTE


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Make it current inside."""
    before, _here.stream = current_stream(), chosen or current_stream()
    try:
        yield
    finally:
        _here.stream = before


def _synchronize(device: Any = None) -> None:
    recorder().host_waits(recorder().trace.everything(), "torch.cuda.synchronize")


_GPU_NBYTES = 80_000_000_000
_REPLACED: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "stream": stream,
    "set_stream": lambda chosen: setattr(_here, "stream", chosen),
    "synchronize": _synchronize,
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda *_: "simulated",
    "get_device_capability": lambda *_: (9, 0),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    "set_rng_state": lambda *_: None,
    "set_rng_state_all": lambda *_: None,
    "manual_seed": lambda *_: None,
    "manual_seed_all": lambda *_: None,
    "mem_get_info": lambda *_: (_GPU_NBYTES, _GPU_NBYTES),
    "memory_reserved": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "_lazy_init": lambda: None,
}


@contextmanager
def as_gpu(found: Recorder) -> Iterator[None]:
    """Inside, `torch.cuda` has one GPU, and what it is asked for goes to `found`."""
    global _recorder
    _recorder = found
    found.stream_name = lambda: current_stream().name
    with ExitStack() as stack:
        for name, stand_in in _REPLACED.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        yield
