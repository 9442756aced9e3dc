"""What carries a link's bytes: a group of two inside a start, a connection between two jobs."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GroupWire", "SocketWire", "Wire"]

_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 120_000))
"""Seconds (the last: milliseconds) after which a machine that has gone without a word is found to be gone."""


class Wire(Protocol):
    """One of its two ends. An end that is gone or late raises RuntimeError or OSError."""

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send host tensors; returns when the bytes are taken over."""

    def take(self, tensor: Tensor) -> None:
        """Fill a host tensor with what comes next; waits for it."""

    def close(self) -> None:
        """Give the connection up. Idempotent."""


class GroupWire:
    """A gloo group of two, beside those of the default group: it has no rank of the job, and ends with this object."""

    def __init__(self, store: dist.Store, name: str, side: int, timeout: timedelta) -> None:
        """`name`: the same at both ends, whose `side` is 0 or 1. Blocks for the other one."""
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"hf_dist/link/{name}", store), side, 2, timeout)
        self._to = 1 - side

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send host tensors."""
        for work in [self._group.send([part], self._to, 0) for part in parts]:
            work.wait()

    def take(self, tensor: Tensor) -> None:
        """Fill a host tensor."""
        self._group.recv([tensor], self._to, 0).wait()

    def close(self) -> None:
        """Nothing: the group ends with this object."""


class SocketWire:
    """A connection whose two ends have proved themselves (`door.py`)."""

    def __init__(self, connection: socket.socket, timeout: timedelta) -> None:
        """`timeout`: for which the other end may send nothing, or take nothing."""
        connection.settimeout(timeout.total_seconds())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE:
            with contextlib.suppress(OSError):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send host tensors."""
        for part in parts:
            self._socket.sendall(_bytes(part))

    def take(self, tensor: Tensor) -> None:
        """Fill a host tensor."""
        left = _bytes(tensor)
        while left.nbytes:
            taken = self._socket.recv_into(left)
            if not taken:
                raise ConnectionResetError("the connection was closed")
            left = left[taken:]

    def is_ready(self, seconds: float) -> bool:
        """Whether something has come, or the other end is gone; waits for it as long as this."""
        with selectors.DefaultSelector() as waiting:  # select() knows no descriptors above 1023
            waiting.register(self._socket, selectors.EVENT_READ)
            return bool(waiting.select(seconds))

    def close(self) -> None:
        """End the connection, also for a thread that waits at this end."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
