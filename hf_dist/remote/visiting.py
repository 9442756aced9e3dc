"""The way to a role of another job: the data ranks of the asking role go in at its doors together."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from hf_dist.dist.door import VISIT, knock
from hf_dist.dist.excepthook import print_error
from hf_dist.dist.link import Link
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT
from hf_dist.dist.secret import Secret
from hf_dist.dist.wires import SocketWire
from hf_dist.errors import RemoteError
from hf_dist.remote.offer import Offer
from hf_dist.remote.routes import failure_of, server_of
from hf_dist.remote.visits import BEGIN

__all__ = ["ToJob"]

_ANSWER = 30.0
"""Seconds in which a door answers."""
_LAST_WORDS = 2.0
"""Seconds in which another rank says what it knows of the end of a role."""
_WAITED = 30.0
"""Seconds of waiting for its turn after which a job says so, ever rarer."""
_visits = 0


class ToJob:
    """One visit. Every rank of the asking role makes it, at the same time."""

    def __init__(
        self, store: Any, role: str, address: tuple[str, int], student: int, students: int, *, leads: bool
    ) -> None:
        """`store`: of the asking role's start. `leads`: whether this rank asks for those that share its rows. Waits for the
        role to be there, and for its turn. Raises `RemoteError` on every rank, if the role refuses this job or does not come.
        """
        global _visits
        _visits += 1
        self._store, self._role, self._address = store, role, address
        self._student, self._students = student, students
        self._key, self._failure = f"visits/{role}/{_visits}", f"{failure_of(role)}/{_visits}"
        self._secret = Secret.of_environment()
        self._connection: socket.socket | None = None
        heads = student == 0 and leads
        if heads:
            self._said("offer", self._first_in)
        visit, self.offer = self._offered(json.loads(self._heard("offer")))
        if leads and not heads:
            self._said(f"in/{student}", lambda: self._go_in(visit))
        if heads:
            self._said("begun", self._begin)
        self._heard("begun")

    def _said(self, key: str, act: Callable[[], str]) -> None:
        """Do it, and let all ranks know how it went."""
        try:
            self._store.set(f"{self._key}/{key}", "+" + act())
        except RemoteError as error:
            self._store.set(f"{self._key}/{key}", "-" + str(error))

    def _heard(self, key: str) -> str:
        """How it went on another rank; waits for it. Raises its error."""
        self._store.wait([f"{self._key}/{key}"], 2 * DEFAULT_TIMEOUT)
        said: str = self._store.get(f"{self._key}/{key}").decode()
        if said.startswith("-"):
            raise RemoteError(f"role {self._role}: {said[1:]}")
        return said[1:]

    def _offered(self, said: Mapping[str, Any]) -> tuple[bytes, Offer]:
        return bytes.fromhex(said["visit"]), Offer.of(said, f"role {self._role}")

    def _first_in(self) -> str:
        """Go in at the first door, and wait for this job's turn."""
        visit, where = os.urandom(VISIT), f"role {self._role} at {self._address[0]}:{self._address[1]}"
        self._connection = knock(
            self._address, self._secret, (visit, 0, self._students), _ANSWER,
            until=DEFAULT_TIMEOUT.total_seconds(), tell=lambda why: print_error(f"hf_dist: waits for {where}: {why}"),
        )  # fmt: skip
        wire, waited, pause = SocketWire(self._connection, DEFAULT_TIMEOUT), 0.0, _WAITED
        while not wire.is_ready(pause):
            waited, pause = waited + pause, waited + pause
            if waited > DEFAULT_TIMEOUT.total_seconds():
                raise RemoteError(f"it served another job for all of {waited:.0f} s")
            print_error(f"hf_dist: has waited {waited:.0f} s for {where}, which serves another job; this one is next")
        header, _ = Link(wire, self._peer(0)).receive()
        return json.dumps({**header, "visit": visit.hex()})

    def _go_in(self, visit: bytes) -> str:
        server = server_of(self._student, self._students, len(self.offer.doors))
        host, port = self.offer.doors[server]
        place = (host or self._address[0], port if server else self._address[1])
        self._connection = knock(place, self._secret, (visit, self._student, self._students), _ANSWER)
        return ""

    def _begin(self) -> str:
        """Once all are in."""
        for student in range(1, self._students):
            self._heard(f"in/{student}")
        assert self._connection is not None
        Link(SocketWire(self._connection, DEFAULT_TIMEOUT), self._peer(0)).send({"call": BEGIN})
        return ""

    def _peer(self, server: int) -> str:
        return f"data rank {server} of role {self._role}"

    def link(self, timeout: timedelta) -> Link:
        """The link. Of a rank that leads."""
        assert self._connection is not None
        server = server_of(self._student, self._students, len(self.offer.doors))
        return Link(SocketWire(self._connection, timeout), self._peer(server))

    def tell(self, problem: Mapping[str, Any]) -> None:
        """Let the other ranks of this job know of an error of the role."""
        self._store.set(self._failure, json.dumps(problem))

    def failure(self) -> Mapping[str, Any] | None:
        """What another rank of this job was told by the role, which may be told at this moment."""
        over = time.monotonic() + _LAST_WORDS
        while not self._store.check([self._failure]):
            if time.monotonic() > over:
                return None
            time.sleep(0.1)
        found: Mapping[str, Any] = json.loads(self._store.get(self._failure))
        return found
