"""How ranks report their location: the watchdog's own TCP connections, one JSON object per line.

It does not use a process group of training, which may hang, nor the launcher's store, which ends with rank 0. The first and
the last rank both listen, in case one of them is stopped. They send only one kind of message: that a rank of the job has
ended, or that they themselves end.
"""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Collector", "Heard", "Sender"]

_MAX_LINE = 1 << 16
_SEND_SECONDS = 1.0


@dataclass
class Heard:
    """The collector's knowledge of one rank."""

    status: dict[str, Any]
    """Its last status."""
    at: float
    """Time of arrival, in seconds of this process's monotonic clock."""
    ended: float | None = None
    """Time at which its connection closed; None while it is open."""
    last_words: str | None = None
    """Its own message on why it ended; None if it was killed from outside."""


class Collector:
    """Listens to all ranks. Call its methods from one thread; any thread may read `heard`."""

    def __init__(self, token: str, host: str = "127.0.0.1", ranks: int = 1024) -> None:
        """`token`: secret of the job; messages without it are rejected. `host`: the address at which the ranks call.

        `ranks`: as many connections may be open that have not said the secret; of more, the oldest is closed.
        """
        self.token = token
        self.heard: dict[int, Heard] = {}
        self._strangers = max(ranks, 8)
        try:
            self._server = socket.create_server((host, 0), backlog=1024)
        except OSError:  # an address that others see, and this machine does not have
            self._server = socket.create_server(("", 0), backlog=1024)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._unread: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._server.getsockname()[1])

    def poll(self, seconds: float) -> None:
        """Receive messages for `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                connection: Any = key.fileobj
                if connection is self._server:
                    with contextlib.suppress(OSError):
                        accepted, _ = self._server.accept()
                        accepted.setblocking(False)
                        self._unread[accepted] = b""
                        self._selector.register(accepted, selectors.EVENT_READ)
                        self._close_strangers()
                else:
                    self._read(connection)

    def _close_strangers(self) -> None:
        silent = [connection for connection in self._unread if connection not in self._ranks]
        for connection in silent[: -self._strangers]:
            self._hang_up(connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._unread[connection] + data).split(b"\n")
        self._unread[connection] = rest
        known = all(self._take(connection, line) for line in lines)
        if not data or not known or len(rest) > _MAX_LINE:
            self._hang_up(connection)

    def _take(self, connection: socket.socket, line: bytes) -> bool:
        try:
            message = json.loads(line)
            if message["token"] != self.token:
                return False
            rank = int(message["rank"])
        except (ValueError, KeyError, TypeError):
            return False
        self._ranks[connection] = rank
        if "last_words" in message:
            heard = self.heard.setdefault(rank, Heard({}, time.monotonic()))
            heard.last_words = str(message["last_words"])
        else:
            self.heard[rank] = Heard(message, time.monotonic())
        return True

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._unread[connection]
        rank = self._ranks.pop(connection, None)
        if rank is not None and rank not in self._ranks.values():
            self.heard[rank].ended = time.monotonic()

    def send(self, message: dict[str, object]) -> None:
        """Send `message` to all connected ranks without blocking; data that a connection cannot take at once is dropped."""
        line = json.dumps(message).encode() + b"\n"
        for connection in list(self._ranks):
            with contextlib.suppress(OSError):
                connection.send(line)

    def close(self) -> None:
        """Close the port and all connections."""
        for connection in self._unread:
            connection.close()
        self._selector.close()
        self._server.close()


class Sender:
    """Sends to one collector. A message that cannot be sent is dropped; the next one reconnects."""

    def __init__(self, address: tuple[str, int], token: str, rank: int) -> None:
        self.address = address
        self._head = {"token": token, "rank": rank}
        self._socket: socket.socket | None = None
        self._unread = b""

    def send(self, message: dict[str, object]) -> None:
        """Send one message; gives up after a second, because a stopped process does not read."""
        line = json.dumps({**self._head, **message}).encode() + b"\n"
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self.address, timeout=_SEND_SECONDS)
            self._socket.sendall(line)
        except OSError:
            self.close()

    def hear(self) -> list[dict[str, Any]]:
        """Messages from the collector since the last call, without waiting. Closes a connection that the collector closed."""
        heard: list[dict[str, object]] = []
        with contextlib.suppress(OSError, ValueError):
            while self._socket is not None and select.select([self._socket], [], [], 0)[0]:
                data = self._socket.recv(1 << 16)
                *lines, self._unread = (self._unread + data).split(b"\n")
                heard += [json.loads(line) for line in lines]
                if not data:
                    self.close()
            return heard
        self.close()
        return heard

    @property
    def is_open(self) -> bool:
        """Whether the connection was open at its last use."""
        return self._socket is not None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._unread = b""
