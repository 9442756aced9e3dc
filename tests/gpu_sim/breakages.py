"""Waits and other steps of the engine, each taken out: what finds faults has to find these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _weights_are_not_waited_for() -> None:
    from hf_dist.sharding.group import FlatGroup

    original = FlatGroup.wait_unshard

    def wait_unshard(self: Any) -> None:
        self.full._gather = None
        original(self)

    FlatGroup.wait_unshard = wait_unshard  # type: ignore[method-assign]


def _freed_while_gathered() -> None:
    from hf_dist.sharding.group import FlatGroup

    original = FlatGroup.reshard

    def reshard(self: Any) -> None:
        self.full._gather = None
        original(self)

    FlatGroup.reshard = reshard  # type: ignore[method-assign]
    _weights_are_not_waited_for()


def _host_reads_at_once() -> None:
    from hf_dist.memory.offload.host import HostLink

    HostLink.wait_host = lambda self: self._in_use.clear()  # type: ignore[method-assign]


def _device_reads_at_once() -> None:
    from hf_dist.memory.offload.host import HostLink

    HostLink.wait_device = lambda self: None  # type: ignore[method-assign]


def _reductions_are_not_waited_for() -> None:
    from hf_dist.dist import collectives

    original = collectives.reduce_scatter

    def reduce_scatter(*given: Any) -> Any:
        handle = original(*given)
        handle._works = []
        return handle

    collectives.reduce_scatter = reduce_scatter  # type: ignore[assignment]


def _the_norm_is_read() -> None:
    from hf_dist.engine.window import Window

    original = Window.clip

    def clip(self: Any, max_norm: float) -> Any:
        norm = original(self, max_norm)
        float(norm)
        return norm

    Window.clip = clip  # type: ignore[method-assign]


def _channels_are_not_connected() -> None:
    from hf_dist.parallel.pipeline.p2p import P2PTransport
    from hf_dist.parallel.pipeline.runtime import ScheduleRun

    P2PTransport.connect = lambda self: None  # type: ignore[method-assign]
    ScheduleRun._may_post = lambda self, action: True  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "the wait for gathered weights": _weights_are_not_waited_for,
    "the wait before weights are freed": _freed_while_gathered,
    "the wait for what is on its way to the host": _host_reads_at_once,
    "the wait for what is on its way to the device": _device_reads_at_once,
    "the wait for a reduction": _reductions_are_not_waited_for,
    "reading the norm only when it is asked for": _the_norm_is_read,
    "connecting the channels, with receives posted before the sends they depend on": _channels_are_not_connected,
}
"""What is taken out -> taking it out, in a simulated rank."""
