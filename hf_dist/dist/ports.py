"""A TCP port for the store of a job, held from the moment it is chosen until the rank that asked for it has bound it."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from types import TracebackType

__all__ = ["HeldPort"]

_RANGE = range(20_000, 30_000)
"""Below those from which systems take the local ends of connections, and below the node ports of Kubernetes, whose packets
go elsewhere: nobody gets one of these unasked."""


class HeldPort:
    """A port of this machine that no other `HeldPort` and no program that asks for any free port gets. A context manager.

    The socket is bound and never listens, and allows others to bind its address as servers do (SO_REUSEADDR): on Linux
    such a server can listen there while the port is held, so there is no moment at which the port is free. Elsewhere
    the port is given back at once, as nobody else could bind it.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = _bound()
        self.number: int = self._socket.getsockname()[1]
        if sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, which was exclusive
        else:
            self.release()

    def release(self) -> None:
        """Let others choose this port, when the rank that asked for it listens there or has ended."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _bound() -> socket.socket:
    for _ in range(1000):
        port = random.SystemRandom().choice(_RANGE)
        taken = socket.socket(socket.AF_INET6) if socket.has_dualstack_ipv6() else socket.socket()
        with contextlib.suppress(OSError):
            if taken.family == socket.AF_INET6:
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # of both kinds of address
            taken.bind(("", port))
            return taken
        taken.close()
    raise RuntimeError(f"no free TCP port was found between {_RANGE.start} and {_RANGE.stop}")
