"""Jobs that ask a role of another job: the role's end of one visit after another. It outlives them."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

from torch import Tensor

from hf_dist.dist.door import Door, Guest
from hf_dist.dist.link import Link, Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.rendezvous import have_come, own_address
from hf_dist.dist.roles import Place
from hf_dist.dist.secret import Secret
from hf_dist.dist.wires import SocketWire
from hf_dist.errors import RemoteError
from hf_dist.log import say_here
from hf_dist.remote.offer import Offer
from hf_dist.remote.routes import PATIENCE
from hf_dist.remote.serving import Calls, JobGone, Release, Server

__all__ = ["BEGIN", "Visit", "Visits", "serve_jobs"]

BEGIN = "begin"
"""What a visitor says when all data ranks of its job are in."""
_BEGINNING = timedelta(minutes=10)
"""In which they are, once it is their turn."""
_LOOK = 1.0
"""Seconds after which a rank that waits for its visitor looks whether the visit is over."""


class Visits:
    """Every rank of the role has one; each that leads a data rank opens a door."""

    def __init__(self, place: Place, mesh: ParallelMesh, port: int, offer: Offer) -> None:
        """`port`: of the first data rank; the others take the next ones. Collective over the role.

        Raises `ConfigError` without a secret, or for a port that is taken.
        """
        self._place, self._role, self._count = place, place.role.name, 0
        self._door: Door | None = None
        key = f"visits/{self._role}/door"
        if mesh.views["batch"].rank == 0:
            self._door = Door(port + mesh.data.rank, Secret.of_environment(), self._role)
            host = [socket.gethostname(), own_address(), self._door.port]
            place.store.set(f"{key}/{mesh.data.rank}", json.dumps(host))
        keys = [f"{key}/{rank}" for rank in range(mesh.data.size)]
        place.store.wait(keys)
        doors = [json.loads(found) for found in place.store.multi_get(keys)]
        machine = doors[0][0]
        self._offer = replace(offer, doors=tuple(("" if d[0] == machine else d[1], d[2]) for d in doors))
        if place.rank == 0:
            last = f" to {doors[-1][2]}" if len(doors) > 1 else ""
            say_here(f"role {self._role}: other jobs may ask at {doors[0][1]}, port {doors[0][2]}{last}")

    def next(self) -> Visit:
        """The next visit; waits for it. Collective over the role."""
        self._count += 1
        key, link = f"visits/{self._role}/{self._count}", None
        if self._place.rank == 0:
            guest, link = self._let_in()
            self._place.store.set(key, json.dumps([guest.visit.hex(), guest.of, guest.host]))
        while not have_come(self._place.store, [key], PATIENCE):
            pass
        visit, students, host = json.loads(self._place.store.get(key))
        return Visit((self._place.store, key), self._door, bytes.fromhex(visit), students, (host, link))

    def _let_in(self) -> tuple[Guest, Link]:
        """The first data rank of a job whose ranks are all in. Of rank 0."""
        assert self._door is not None
        while True:
            guest = self._door.guest(lambda guest: guest.number == 0, PATIENCE.total_seconds())
            if guest is None:
                continue
            link = Link(SocketWire(guest.connection, _BEGINNING), f"the job at {guest.host}")
            try:
                link.send(self._offer.header())
                if link.receive()[0].get("call") == BEGIN:
                    return guest, Link(SocketWire(guest.connection, PATIENCE), _name(0, guest.host))
            except RemoteError as error:
                say_here(f"role {self._role}: a visit ended before it began: {error}")
            link.close()
            self._door.dismiss(functools.partial(_is_of, guest.visit))


class Visit:
    """One job that asks, as this rank reaches those of its data ranks that it answers."""

    outlived = True

    def __init__(
        self, over: tuple[Any, str], door: Door | None, visit: bytes, students: int, first: tuple[str, Link | None]
    ) -> None:
        """`over`: a store, and a key under which a rank says that the visit is over. `first`: the host of the first visitor
        and, on the rank that has it, its link."""
        self.count = students
        self.host, link = first
        self._store, self._key = over[0], f"{over[1]}/over"
        self._door, self._visit = door, visit
        self._links = {} if link is None else {0: link}
        if door is not None:  # of visits that ended before they began; first ones wait for their turn
            door.dismiss(lambda guest: guest.visit != visit and guest.number > 0)

    def receive(self, student: int) -> Message:
        """What a data rank has sent: a call. Raises `RemoteError` if it is gone, or another one is."""
        link, wire = self._link(student), self._links[student].wire
        assert isinstance(wire, SocketWire)
        if link.is_broken:
            raise RemoteError(f"{_name(student, self.host)} has ended")
        while not wire.is_ready(_LOOK):
            self._look()
        header, tensors = link.receive()
        if not _is_call(header, len(tensors)):
            link.close()
            raise RemoteError(f"{_name(student, self.host)} sent what is no call of hf_dist's")
        return header, tensors

    def send(self, student: int, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> None:
        """Answer a data rank. Raises `RemoteError` if it is gone."""
        self._link(student).send(header, tensors)

    def gone(self, why: str) -> None:
        """Let the ranks know that wait for visitors of theirs."""
        self._store.set(self._key, why)

    def close(self) -> None:
        """Give up what is left of it."""
        for link in self._links.values():
            link.close()
        if self._door is not None:
            self._door.dismiss(functools.partial(_is_of, self._visit))

    def _link(self, student: int) -> Link:
        """All are in before a visit begins."""
        while student not in self._links:
            assert self._door is not None
            guest = self._door.guest(lambda each: each.visit == self._visit and each.number == student, _LOOK)
            if guest is not None:
                self._links[student] = Link(SocketWire(guest.connection, PATIENCE), _name(student, self.host))
            else:
                self._look()
        return self._links[student]

    def _look(self) -> None:
        if self._store.check([self._key]):
            raise RemoteError(self._store.get(self._key).decode())


def _is_of(visit: bytes, guest: Guest) -> bool:
    return guest.visit == visit


def _name(student: int, host: str) -> str:
    return f"data rank {student} of the job at {host}"


def _is_call(header: Mapping[str, Any], count: int) -> bool:
    """Whether that is a call of an `Asker` with so many tensors."""
    kinds = {"call": str, "number": int, "names": list, "dropped": list, "options": dict}
    return (
        set(header) == set(kinds)
        and all(isinstance(header[name], kind) for name, kind in kinds.items())
        and all(isinstance(name, str) for name in header["names"])
        and all(isinstance(number, int) for number in header["dropped"])
        and len(header["names"]) == count
    )


def serve_jobs(
    visits: Visits, place: Place, mesh: ParallelMesh, answers: Callable[[], tuple[Calls, Release]]
) -> NoReturn:
    """Answer one job after another, for ever. Every rank of the role calls it.

    `answers()`: what answers the calls of one job; nothing of one visit is left in the next.
    """
    while True:
        visit = visits.next()
        server, (calls, release) = Server(place, mesh, visit), answers()
        count, how = 0, "has ended"
        try:
            while server.serve_one(calls, release):
                count += 1
        except JobGone as gone:
            how = f"is gone: {gone}"
        visit.close()
        if place.rank == 0:
            ranks = "1 data rank" if visit.count == 1 else f"{visit.count} data ranks"
            say_here(
                f"role {place.role.name}: answered {count} calls of the job at {visit.host} ({ranks}), which {how}"
            )
