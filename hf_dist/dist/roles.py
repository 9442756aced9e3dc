"""Roles: the processes of one start, divided into jobs of their own before any axis divides a job.

After `divide`, the variables of the launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) describe this process's role. All
other code sees a smaller job. What roles say to each other goes through links (`link.py`), which meet in the start's store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_dist.dist.launch import detect_launch
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT, has_started, meet_as, prepare_start, start_store
from hf_dist.errors import ConfigError, Problem

__all__ = ["REST", "Place", "Role", "dealt", "divide", "place"]

REST = "rest"
"""In place of a number of ranks: those that the other roles leave."""
_PATH = "hf_dist.roles"
_place: Place | None = None


@dataclass(frozen=True)
class Role:
    """Neighbouring ranks of a start."""

    name: str
    first: int
    """Its first rank of the start."""
    size: int
    of: str = ""
    """The role of the file, where it has replicas: each of them is a role here."""
    replica: int = 0
    """Its number among them."""
    replicas: int = 1

    @property
    def kind(self) -> str:
        """Its name in the file."""
        return self.of or self.name


@dataclass(frozen=True)
class Place:
    """Where this process is among the roles."""

    roles: Mapping[str, Role]
    role: Role
    """Its own."""
    rank: int
    """Within the role."""
    local_rank: int
    """Among the ranks of the role on this machine."""
    store: Any
    """That of the start, which all roles reach."""


def dealt(sizes: Mapping[str, int | str], world: int, replicas: Mapping[str, int] | None = None) -> dict[str, Role]:
    """The roles of `world` ranks, in the order of the file. Raises `ConfigError` if they do not add up. Pure.

    `replicas`: role -> equal parts of it; each is a role: trainer, trainer.1, trainer.2.
    """
    open_ended = [name for name, size in sizes.items() if size == REST]
    if len(open_ended) > 1:
        raise _problem(
            f"{open_ended[1]}.ranks", REST, f"is said of {open_ended[0]}, too", "Give all roles but one a number."
        )
    given = {name: int(size) for name, size in sizes.items() if size != REST}
    for name, size in given.items():
        if size < 1:
            raise _problem(f"{name}.ranks", str(size), "is no number of ranks", "Use 1 or more.")
    left = world - sum(given.values())
    if (open_ended and left < 1) or (not open_ended and left):
        total = " + ".join(f"{size} ({name})" for name, size in given.items())
        what = f"leaves no rank for {open_ended[0]}" if open_ended else f"is not the {world} ranks that were started"
        raise _problem("", total, what, f'Start other numbers of processes, or give one role "ranks": "{REST}".')
    found, first = {}, 0
    for name in sizes:
        size, count = given.get(name, left), (replicas or {}).get(name, 1)
        if size % count:
            raise _problem(
                f"{name}.replicas", str(count), f"does not divide the {size} ranks of {name}", "Start a multiple of it."
            )
        for number in range(count):
            own = f"{name}.{number}" if number else name
            found[own] = Role(own, first, size // count, name, number, count)
            first += size // count
    return found


def _problem(key: str, found: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(Problem(f"{_PATH}.{key}" if key else _PATH, found, expected, fix))


def place() -> Place | None:
    """Where this process is; None if the start has no roles. Local."""
    return _place


def described(jobs: Mapping[str, str]) -> list[str]:
    """The roles of this start, with their ranks, for people; empty without any. `jobs`: role of another job -> where. Local."""
    if _place is None:
        return []
    parts = [f"{r.name} on {_ranks(r)}" for r in _place.roles.values() if r.name != _place.role.name]
    parts += [f"{name} in the job at {where}" for name, where in jobs.items()]
    return [
        "; ".join(
            [f"this is {_place.role.name}, {_ranks(_place.role)} of the start", *([", ".join(parts)] if parts else [])]
        )
    ]


def _ranks(role: Role) -> str:
    return f"ranks {role.first}-{role.first + role.size - 1}" if role.size > 1 else f"rank {role.first}"


def divide(
    sizes: Mapping[str, int | str], replicas: Mapping[str, int] | None = None, whole: tuple[int, int] | None = None
) -> Place:
    """Make this process a member of its role only. Every process of the start calls it, before torch.distributed starts.

    `replicas`: role -> equal parts of it; `whole`: (number, of how many) if this start is one replica. A second call with the
    same roles returns the first one's answer. Raises `ConfigError` for roles that do not add up, or that come too late.
    """
    global _place
    if _place is not None:
        if list(dict.fromkeys(role.kind for role in _place.roles.values())) != list(sizes):
            raise _problem(
                "", ", ".join(sizes), f"but this start was divided into {', '.join(_place.roles)}", "Keep one file."
            )
        return _place
    launch = detect_launch()
    roles = dealt(sizes, launch.world_size, replicas)
    if whole is not None:
        roles = {name: replace(role, replica=whole[0], replicas=whole[1]) for name, role in roles.items()}
    if has_started():
        raise _problem(
            "", ", ".join(sizes), "come too late: torch.distributed has started",
            "Create the DistTrainingArguments (or DistAccelerator) before any other object of accelerate, or start the script "
            "with `-m hf_dist.run --config FILE`.",
        )  # fmt: skip
    role = next(r for r in roles.values() if r.first <= launch.rank < r.first + r.size)
    rank = launch.rank - role.first
    prepare_start()
    store = start_store(launch.rank, launch.world_size)
    hosts = [f"roles/host/{r}" for r in range(role.first, role.first + role.size)]
    store.set(hosts[rank], socket.gethostname())
    store.wait(hosts, DEFAULT_TIMEOUT)
    is_here = [name.decode() == socket.gethostname() for name in store.multi_get(hosts)]
    meet_as(role.name, rank, store)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(role.size), LOCAL_WORLD_SIZE=str(sum(is_here)), HF_DIST_ROLE=role.name
    )
    _place = Place(roles, role, rank, sum(is_here[:rank]), store)
    return _place
