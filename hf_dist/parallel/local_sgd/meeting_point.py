"""How replicas and a server find each other: every rank of a replica has a link to every rank of the server.

Within a start they meet in its store. Between jobs each rank of the server opens a door (`dist/door.py`), and the first one
tells where the others are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hf_dist.dist import roles
from hf_dist.dist.door import VISIT, Door, knock
from hf_dist.dist.door import Guest as VisitingRank
from hf_dist.dist.excepthook import print_error
from hf_dist.dist.link import Link
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT, own_address
from hf_dist.dist.roles import Place
from hf_dist.dist.secret import Secret
from hf_dist.dist.wires import GroupWire, SocketWire
from hf_dist.errors import ConfigError, Problem, RemoteError
from hf_dist.log import say_here
from hf_dist.parallel.local_sgd.guests import Guests

__all__ = ["Reached", "expect_replicas", "open_doors", "reach"]

_PATIENCE = timedelta(days=7)
"""How long a server waits for the next call of a replica."""
_ANSWER = 30.0
"""Seconds in which a door answers."""
_NUMBER = struct.Struct(">I")
"""Of the replica, at the end of what names its visit."""
_POLL = 0.1
"""Seconds between two looks for replicas that have not come."""


@dataclass(frozen=True, eq=False)
class Reached:
    """A server, as this process reaches it until it ends."""

    links: list[Link]
    """One to each of its ranks."""

    def leave(self) -> None:
        """Tell the server that nothing follows. Idempotent; runs at the end of the process, too."""
        links, self.links[:] = list(self.links), []
        for link in links:
            with contextlib.suppress(RemoteError):  # it has ended already
                link.send({"call": "leave"})


@functools.cache
def reach(server: str, job: tuple[str, int] | None = None) -> Reached:
    """The role `server` of this start, or of the job at (host, port). The first call blocks for it. Every rank calls it.

    Raises `ConfigError` in a process that is in no role.
    """
    place = roles.place()
    if place is None:
        fix = (
            "Create the DistTrainingArguments (or DistAccelerator) first, or start with `-m hf_dist.run --config FILE`."
        )
        raise ConfigError(Problem("hf_dist.roles", server, "was not reached: this process has no role yet", fix))
    reached = Reached(_links_within(place, server) if job is None else _links_to(place, server, job))
    atexit.register(reached.leave)
    return reached


def _links_within(place: Place, server: str) -> list[Link]:
    own, store, to = place.role, place.store, place.roles[server]
    if place.rank == 0:
        store.set(_key(server, own.replica), json.dumps({"ranks": own.size, "session": uuid.uuid4().hex}))
    names = [_name(server, own.replica, place.rank, other) for other in range(to.size)]
    return [Link(GroupWire(store, name, 1, DEFAULT_TIMEOUT), f"{server} rank {i}") for i, name in enumerate(names)]


def _links_to(place: Place, server: str, job: tuple[str, int]) -> list[Link]:
    own, secret, key = place.role, Secret.of_environment(), f"{_key(server, place.role.replica)}/visit"
    if place.rank == 0:
        place.store.set(key, (os.urandom(VISIT - _NUMBER.size) + _NUMBER.pack(own.replica)).hex())
    guest = (bytes.fromhex(place.store.get(key).decode()), place.rank, own.size)
    where = f"role {server} at {job[0]}:{job[1]}"
    tell = functools.partial(_tell, where) if place.rank == 0 else _say_nothing
    first = knock(job, secret, guest, _ANSWER, until=DEFAULT_TIMEOUT.total_seconds(), tell=tell)
    links = [Link(SocketWire(first, DEFAULT_TIMEOUT), f"{server} rank 0")]
    doors = links[0].receive()[0]["doors"]
    for rank, (host, port) in enumerate(doors[1:], start=1):
        connection = knock((host or job[0], port), secret, guest, _ANSWER)
        links.append(Link(SocketWire(connection, DEFAULT_TIMEOUT), f"{server} rank {rank}"))
    return links


def _tell(where: str, why: str) -> None:
    print_error(f"hf_dist: waits for {where}: {why}")


def _say_nothing(why: str) -> None:
    pass


def expect_replicas(place: Place, guests: Guests, replicas: int) -> None:
    """Take up the replicas that come, whenever they come, in a thread. Every rank of the server calls it."""
    name, rank = place.role.name, place.rank

    def connect(number: int, other: int) -> Link:
        # A store answers one thread at a time, and this one waits until the other end is there.
        wire = GroupWire(place.store.clone(), _name(name, number, other, rank), 0, _PATIENCE)
        return Link(wire, f"rank {other} of replica {number}")

    def look(store: Any) -> None:
        missing = set(range(replicas))
        while missing:
            for number in sorted(missing):
                if store.check([_key(name, number)]):
                    missing.discard(number)
                    found: Mapping[str, Any] = json.loads(store.get(_key(name, number)))
                    guests.expect(number, found["ranks"], found["session"], functools.partial(connect, number))
            time.sleep(_POLL)

    threading.Thread(target=look, args=(place.store.clone(),), name="hf_dist expects replicas", daemon=True).start()


def open_doors(place: Place, guests: Guests, port: int) -> None:
    """Take up the replicas of other jobs that come in at `port` + rank, in a thread. Every rank of the server calls it.

    Raises `ConfigError` without a secret, or for a port that is taken.
    """
    door = Door(port + place.rank, Secret.of_environment(), place.role.name)
    keys = [f"{_key(place.role.name, 0)}/door/{rank}" for rank in range(place.role.size)]
    place.store.set(keys[place.rank], json.dumps([socket.gethostname(), own_address(), door.port]))
    place.store.wait(keys)
    found = [json.loads(each) for each in place.store.multi_get(keys)]
    doors = [("" if name == found[0][0] else host, number) for name, host, number in found]
    if place.rank == 0:
        say_here(f"role {place.role.name}: replicas of other jobs may come in at {found[0][1]}, port {doors[0][1]}")
    threading.Thread(
        target=_let_in,
        args=(door, guests, doors if place.rank == 0 else ()),
        name="hf_dist lets replicas in",
        daemon=True,
    ).start()


def _let_in(door: Door, guests: Guests, doors: Sequence[tuple[str, int]]) -> None:
    """`doors`: of all ranks of the server; of its first rank, which tells them."""
    seen: dict[bytes, VisitingRank] = {}
    while True:
        first = door.guest(lambda guest: guest.visit not in seen, _PATIENCE.total_seconds())
        if first is None:
            continue
        seen[first.visit] = first
        (number,) = _NUMBER.unpack(first.visit[-_NUMBER.size :])
        connect = functools.partial(_link_of, door, first, doors)
        guests.expect(number, first.of, first.visit.hex(), connect)


def _link_of(door: Door, first: VisitingRank, doors: Sequence[tuple[str, int]], other: int) -> Link:
    """To rank `other` of the replica whose first connection is `first`; blocks for it. Tells it all doors, if there are any."""
    found: VisitingRank | None = first
    if other != first.number:
        wanted = (first.visit, other)
        found = door.guest(lambda guest: (guest.visit, guest.number) == wanted, DEFAULT_TIMEOUT.total_seconds())
    if found is None:
        raise RemoteError(f"rank {other} did not come")
    link = Link(SocketWire(found.connection, _PATIENCE), f"rank {other} of the replica at {found.host}")
    if doors:
        link.send({"doors": doors})
    return link


def _key(server: str, number: int) -> str:
    return f"replicas/{server}/{number}"


def _name(server: str, number: int, rank: int, to: int) -> str:
    return f"{server}/replica {number}/{rank} to {to}"
