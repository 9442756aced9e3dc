"""How replicas and a server of one start find each other: every rank of a replica has a link to every rank of the server."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hf_dist.dist import roles
from hf_dist.dist.link import Link
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT
from hf_dist.dist.roles import Place
from hf_dist.dist.wires import GroupWire
from hf_dist.errors import ConfigError, Problem, RemoteError
from hf_dist.parallel.local_sgd.guests import Guests

__all__ = ["Reached", "expect_replicas", "reach"]

_PATIENCE = timedelta(days=7)
"""How long a server waits for the next call of a replica."""
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
def reach(server: str) -> Reached:
    """The role `server` of this start. The first call blocks for it. Every rank of the replica calls it.

    Raises `ConfigError` in a process that is in no role.
    """
    place = roles.place()
    if place is None:
        fix = (
            "Create the DistTrainingArguments (or DistAccelerator) first, or start with `-m hf_dist.run --config FILE`."
        )
        raise ConfigError(Problem("hf_dist.roles", server, "was not reached: this process has no role yet", fix))
    own, store, to = place.role, place.store, place.roles[server]
    if place.rank == 0:
        store.set(_key(server, own.replica), json.dumps({"ranks": own.size, "session": uuid.uuid4().hex}))
    names = [_name(server, own.replica, place.rank, other) for other in range(to.size)]
    links = [Link(GroupWire(store, name, 1, DEFAULT_TIMEOUT), f"{server} rank {i}") for i, name in enumerate(names)]
    reached = Reached(links)
    atexit.register(reached.leave)
    return reached


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


def _key(server: str, number: int) -> str:
    return f"replicas/{server}/{number}"


def _name(server: str, number: int, rank: int, to: int) -> str:
    return f"{server}/replica {number}/{rank} to {to}"
