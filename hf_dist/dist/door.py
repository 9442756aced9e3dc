"""The door of a job that others may ask: a connection comes in when both of its ends have proved that they know one secret.

    door -> visitor    40 bytes   what listens here, and a nonce
    visitor -> door    96 bytes   the same, which visit, which of how many visitors, and the proof of all that
    door -> visitor    32 bytes   the door's own proof

Nothing that a stranger sends is more than compared with these 96 bytes: not parsed, not unpickled, not kept. The bytes
after it are not encrypted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_dist.dist.secret import PROOF, Secret
from hf_dist.errors import ConfigError, Problem, RemoteError
from hf_dist.log import say_here

__all__ = ["VISIT", "Door", "Guest", "knock"]

_HERE = b"hf_dist1"
_NONCE = 32
VISIT = 16
"""Bytes that name a visit."""
_NUMBERS = struct.Struct(">II")
_GREETING = len(_HERE) + _NONCE
_SAID = len(_HERE) + _NONCE + VISIT + _NUMBERS.size
_WHOLE = _SAID + PROOF
_SECONDS = 10.0
"""In which a visitor has proved itself, however it deals out its bytes."""
_AT_ONCE, _INSIDE, _NAMED = 64, 4096, 16
"""Connections that are proving themselves, connections that wait to be served, hosts of strangers that are named: no more."""
_AGAIN = 1.0
"""Seconds between two knocks where nobody listens yet."""


@dataclass(frozen=True)
class Guest:
    """A connection that has proved itself."""

    visit: bytes
    number: int
    """Of this visitor among those of its visit."""
    of: int
    connection: socket.socket
    host: str


@dataclass
class _Stranger:
    connection: socket.socket
    host: str
    nonce: bytes
    until: float
    said: bytearray = field(default_factory=bytearray)


class Door:
    """Listens from a thread, which never waits for any one visitor."""

    def __init__(self, port: int, secret: Secret, of: str) -> None:
        """`of`: whose door, for messages. Raises `ConfigError` if another program has the port."""
        self._of, self._secret = of, secret
        dual = socket.has_dualstack_ipv6()
        try:
            self._listening = socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        except OSError as error:
            problem = f"cannot be listened at: {error.strerror}"
            raise ConfigError(Problem(f"hf_dist.roles.{of}.port", str(port), problem, "Choose another.")) from error
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._guests: list[Guest] = []
        self._changed = threading.Condition()
        self._named: set[str] = set()
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._closed = False
        self._waking, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"hf_dist door of {of}", daemon=True)
        self._thread.start()

    def guest(self, wanted: Callable[[Guest], bool], seconds: float) -> Guest | None:
        """The first one inside that is wanted, which then is the caller's; waits so long for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(map(wanted, self._guests)), seconds)
            found = next(filter(wanted, self._guests), None)
            if found is not None:
                self._guests.remove(found)
            return found

    def dismiss(self, unwanted: Callable[[Guest], bool]) -> None:
        """Close those inside that nobody will take."""
        with self._changed:
            for guest in [*filter(unwanted, self._guests)]:
                self._guests.remove(guest)
                guest.connection.close()

    def close(self) -> None:
        """Listen no more; connections that were given away stay."""
        self._closed = True
        self._waking.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listening, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                now = time.monotonic()
                for stranger in [each for each in self._strangers.values() if each.until <= now]:
                    self._refuse(ready, stranger, "did not prove itself in time")
                soonest = min((each.until for each in self._strangers.values()), default=None)
                for key, _ in ready.select(None if soonest is None else max(soonest - now, 0.0)):
                    if key.fileobj is self._listening:
                        self._accept(ready)
                    elif (stranger_or_none := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._read(ready, stranger_or_none)
        for connection in (self._listening, self._woken, self._waking, *self._strangers):
            connection.close()
        with self._changed:
            for guest in self._guests:
                guest.connection.close()
            self._changed.notify_all()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:  # it has gone again, or this process has no descriptor left
            time.sleep(0.01)
            return
        if len(self._strangers) >= _AT_ONCE:
            self._refuse(ready, next(iter(self._strangers.values())), "was one of too many at once")
        connection.setblocking(False)
        host = address[0].removeprefix("::ffff:")  # an IPv4 address at a socket of both kinds
        made = _Stranger(connection, host, os.urandom(_NONCE), time.monotonic() + _SECONDS)
        self._strangers[connection] = made
        ready.register(connection, selectors.EVENT_READ)
        try:
            connection.send(_HERE + made.nonce)  # an empty buffer takes it whole
        except OSError:
            self._refuse(ready, made, "went away")

    def _read(self, ready: selectors.BaseSelector, stranger: _Stranger) -> None:
        try:
            more = stranger.connection.recv(_WHOLE - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        stranger.said += more
        if not more or not _HERE.startswith(stranger.said[: len(_HERE)]):
            self._refuse(ready, stranger, "spoke no word of hf_dist's" if more else "went away without a proof")
        elif len(stranger.said) == _WHOLE:
            self._decide(ready, stranger)

    def _decide(self, ready: selectors.BaseSelector, stranger: _Stranger) -> None:
        said, proof = bytes(stranger.said[:_SAID]), bytes(stranger.said[_SAID:])
        number, of = _NUMBERS.unpack(said[-_NUMBERS.size :])
        if not self._secret.is_proved(proof, b"visitor", stranger.nonce + said):
            self._refuse(ready, stranger, "does not know HF_DIST_SECRET of this job")
            return
        if number >= of or len(self._guests) >= _INSIDE:
            self._refuse(ready, stranger, "is one of too many")
            return
        visit = said[-_NUMBERS.size - VISIT : -_NUMBERS.size]
        self._forget(ready, stranger)
        try:
            stranger.connection.send(self._secret.prove(b"door", said + stranger.nonce))
        except OSError:
            stranger.connection.close()
            return
        stranger.connection.setblocking(True)
        with self._changed:
            self._guests.append(Guest(visit, number, of, stranger.connection, stranger.host))
            self._changed.notify_all()

    def _forget(self, ready: selectors.BaseSelector, stranger: _Stranger) -> None:
        ready.unregister(stranger.connection)
        del self._strangers[stranger.connection]

    def _refuse(self, ready: selectors.BaseSelector, stranger: _Stranger, why: str) -> None:
        """Close, and say so: once for each host, and never of more than a few."""
        self._forget(ready, stranger)
        stranger.connection.close()
        if stranger.host not in self._named and len(self._named) < _NAMED:
            self._named.add(stranger.host)
            say_here(
                f"role {self._of}: refused a connection from {stranger.host} at port {self.port}: it {why}. Others from there "
                "are refused without a word"
            )


def knock(
    place: tuple[str, int],
    secret: Secret,
    guest: tuple[bytes, int, int],
    seconds: float,
    *,
    until: float = 0.0,
    tell: Callable[[str], None] = lambda why: None,
) -> socket.socket:
    """Go in at the door at `place` (host, port) as visitor (visit, number, of): the connection.

    `seconds`: to wait for each answer. `until`: seconds for which a door that nobody has opened yet is tried again, of which
    `tell` is told once. Raises `RemoteError` for a door that does not open, and for one that does not prove itself.
    """
    where = f"{place[0]}:{place[1]}"
    over = time.monotonic() + until
    while True:
        try:
            connection = socket.create_connection(place, timeout=seconds)
            break
        except OSError as error:
            if time.monotonic() >= over:
                raise RemoteError(f"nobody opens at {where}: {error}") from error
            tell(f"nobody opens yet ({error})")
            tell = lambda why: None  # noqa: E731
            time.sleep(_AGAIN)
    try:
        _prove(connection, where, secret, guest)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise RemoteError(f"what listens at {where} does not answer like a role of hf_dist: {error}") from error
        raise
    return connection


def _prove(connection: socket.socket, where: str, secret: Secret, guest: tuple[bytes, int, int]) -> None:
    greeting = _taken(connection, _GREETING)
    if not greeting.startswith(_HERE) or len(greeting) < _GREETING:
        raise RemoteError(f"what listens at {where} is no role of hf_dist of this version: it said {greeting[:16]!r}")
    nonce = greeting[len(_HERE) :]
    visit, number, of = guest
    said = _HERE + os.urandom(_NONCE) + visit + _NUMBERS.pack(number, of)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(said + secret.prove(b"visitor", nonce + said))
    proof = _taken(connection, PROOF)
    if not proof:
        raise RemoteError(f"the role at {where} has refused this job: give both jobs the same HF_DIST_SECRET")
    if not secret.is_proved(proof, b"door", said + nonce):
        raise RemoteError(f"what listens at {where} does not know HF_DIST_SECRET of this job, so nothing is sent there")


def _taken(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer, if the other end closes before."""
    found = bytearray()
    while len(found) < count:
        try:
            more = connection.recv(count - len(found))
        except ConnectionResetError:
            break
        if not more:
            break
        found += more
    return bytes(found)
