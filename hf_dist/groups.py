"""Process groups and axes: who makes which group under which name, and when groups end.

[Note: groups of own rows] A rank makes the groups that it is in and no others, in the one order that all ranks keep. 4096 ranks
in rows of a few have thousands of rows; in torch's way every rank takes part in making every group, and each of them lets the
whole job wait where NCCL splits the default group (it does if that was given a device: we give it none), or where
TORCH_DIST_INIT_BARRIER is set. torch's names for groups that only their members make count the groups of the process, and
that number differs between ranks: `_named` gives ours.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_dist.axes import AXES, EXPERTS, Axes

__all__ = ["FAKE", "GroupLease", "GroupMaker", "Kind", "MeshAxis", "leave_in_order", "num_groups", "plan_groups"]

_BLOCKING = ("dp", "world", "pp", "model", "data", "batch")
"""Views for what every rank waits for at the same place of its program: those with the same lines share a group."""
_TWO_GROUPS = ("shard", "edp")
"""Views with a second group for gradients; they share their groups where they have the same lines."""
FAKE = "fake"
"""torch's backend without other processes: what one rank of a job of any size does and holds."""
Kind = Literal["plain", "urgent", "channel"]
"""Of a group: for weights and gradients, which others wait for; between two stages of a pipeline; or neither."""
LATE_ABOVE = 64
"""Ranks of a gloo group above which two of them connect when they first have something to tell each other. By itself each one
connects to every other: at 4096 ranks that is as many sockets in each process, and some 100 MB that each reads from the store.
"""
_CHANNEL_CTAS = 4
"""Blocks of a GPU that a transfer between pipeline stages takes at most, while it waits, too; NCCL's own limit is 16 to 32."""


class GroupLease:
    """Process groups of a mesh; they end when neither the mesh nor one of its axes is in use any more.

    Each has two threads, one of which wakes a hundred times a second: a process that builds many engines would drown in them.
    """

    def __init__(self, backend: str, number: int = 0) -> None:
        """`number`: of the mesh in this process, the same on every rank; names of groups begin with it."""
        self.number = number
        self.names: Counter[str] = Counter()
        """How many groups of these ranks were made for the same purpose."""
        self.groups: list[dist.ProcessGroup] = []
        self.under_way: set[Any] = set()
        """Collectives that were started and not waited for: the groups do not end before them, or a slower rank would miss
        what this one sends."""
        # NCCL's communicators are left to the end of the process: taking one down waits for all its ranks.
        self.is_gloo = backend == "gloo"
        if self.is_gloo:
            _leases.add(self)
            weakref.finalize(self, _give_back, self.groups, self.under_way).atexit = False


_leases: weakref.WeakSet[GroupLease] = weakref.WeakSet()
_FAREWELL = timedelta(seconds=10)
"""For the slower ranks to take what is on its way when this one ends its groups."""


def _settle(under_way: set[Any]) -> None:
    until = time.monotonic() + _FAREWELL.total_seconds()
    while under_way and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # the other rank has failed, or left without reading
            under_way.pop().complete(_FAREWELL)


@dataclass(frozen=True, eq=False)
class MeshAxis:
    """One axis of the mesh, as this process sees it."""

    name: str
    """Of an axis or a view (`axes.py`), control, background; of a tied parameter: holders."""
    size: int
    """Number of processes along the axis."""
    rank: int
    """This process's coordinate on the axis."""
    group: dist.ProcessGroup | None
    """For weights and small things; None where nobody else is on the axis, then every collective is local."""
    reduce_group: dist.ProcessGroup | None = None
    """A second group of the same ranks for gradients, so that reductions do not queue behind gathers."""
    lease: GroupLease | None = field(default=None, repr=False)
    """Keeps the groups alive."""


def _give_back(groups: list[dist.ProcessGroup], under_way: set[Any]) -> None:
    _settle(under_way)
    while groups and dist.is_initialized():
        with contextlib.suppress(ValueError, RuntimeError):  # ended already, by destroy_process_group()
            dist.destroy_process_group(groups.pop())


@functools.cache  # once per process
def leave_in_order() -> None:
    """Have gloo's threads joined before the interpreter ends.

    Otherwise one exit in several aborts ("terminate called without an active exception"), and a launcher takes the job
    that was done for failed. Not on GPUs: there this could wait for a collective that a failed rank never joins.
    """

    def leave() -> None:
        for lease in list(_leases):
            _settle(lease.under_way)
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


@dataclass(frozen=True)
class PlannedGroups:
    """The groups of one axis or view, before any is made."""

    name: str
    lines: list[list[int]]
    like: str | None
    """The axis with the same lines whose groups it shares."""
    two: bool
    """Whether there is a second one for gradients."""


def plan_groups(axes: Axes) -> Iterator[PlannedGroups]:
    """In the order in which every rank makes them. Pure."""
    seen = set()
    for names, two in ((_BLOCKING, False), (_TWO_GROUPS, True)):
        made: list[tuple[list[list[int]], str]] = []
        for name in names:
            lines = axes.lines(name)
            like = next((first for others, first in made if others == lines), None)
            yield PlannedGroups(name, lines, like, two)
            seen.add(name)
            if like is None:
                made.append((lines, name))
    for name in (*AXES, *EXPERTS):
        # Every rank of `dp_shard` is one of `shard`, which is what is asked for.
        if name not in seen and name != "dp_shard" and axes.size(name) > 1:
            yield PlannedGroups(name, axes.lines(name), None, False)


def num_groups(axes: Axes) -> int:
    """Groups of more than one rank that a rank is in, with the default one; those of a pipeline's channels come on top."""
    planned = [p for p in plan_groups(axes) if p.like is None and len(p.lines[0]) > 1]
    return sum(2 if p.two else 1 for p in planned) + 1 if planned else 0


@dataclass(frozen=True)
class GroupMaker:
    """Makes the process groups of one mesh, all with the same backend and timeout."""

    rank: int
    backend: str
    timeout: timedelta
    lease: GroupLease
    device: torch.device

    def views(self, axes: Axes) -> dict[str, MeshAxis]:
        """Every axis and view, in one order on all ranks. An axis of one rank needs no group."""
        found = {name: MeshAxis(name, 1, 0, None) for name in (*AXES, *EXPERTS) if axes.size(name) == 1}
        for planned in plan_groups(axes):
            shared = found[planned.like] if planned.like is not None else None
            if shared is None or shared.group is None:
                shared = self.axis(planned.name, planned.lines, two=planned.two)
            found[planned.name] = shared
        return found

    def axis(self, name: str, rows: list[list[int]], two: bool = False) -> MeshAxis:
        """`rows`: the global ranks of every line along this axis. Collective over world, with the same rows."""
        size = len(rows[0])
        mine = next((row for row in rows if self.rank in row), [])
        # A job of one process with a process group keeps it: NCCL with one rank then runs the very code of many ranks.
        if not dist.is_initialized() or (size == 1 and dist.get_world_size() > 1):
            return MeshAxis(name, size, mine.index(self.rank), None, None)
        group = self.one_of(rows, name, kind="urgent" if two else "plain")
        reduce_group = self.one_of(rows, name, kind="urgent") if two else group
        if not mine:
            return MeshAxis(name, 0, 0, None, None)
        return MeshAxis(name, size, mine.index(self.rank), group, reduce_group, self.lease)

    def connect(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Use each NCCL group once. Collective over their ranks, in the order in which every rank made its groups.

        What NCCL sets up at a group's first use would else come in the middle of the first backward. A rank whose batch skips a
        unit has other kernels in flight there, and the set-up may wait for one of them whose partner waits for the set-up.
        """
        if self.backend != "nccl":
            return
        token = torch.zeros(1, device=self.device)
        for group in groups:
            if dist.get_backend(group) == "nccl":
                dist.all_reduce(token, group=group)
        torch.cuda.synchronize(self.device)

    def connected(self, name: str, rows: list[list[int]]) -> MeshAxis:
        """`axis` for one that is made after the mesh, ready for use. Collective over world."""
        axis = self.axis(name, rows)
        self.connect([axis.group] if axis.group is not None else [])
        return axis

    def one_of(self, rows: list[list[int]], label: str, *, kind: Kind = "plain") -> dist.ProcessGroup | None:
        """A group of that row which this rank is in; None if it is in none. Collective over world, with the same arguments.

        `label`: what it is for. Never one of another mesh: a model that is dropped may leave a gather in flight, which the
        next user would get.
        """
        mine = next((row for row in rows if self.rank in row), None)
        options = {"timeout": self.timeout, "backend": self.backend, **self._nccl_options(kind)}
        if _splits_default_group():
            made = {tuple(row): dist.new_group(row, **options) for row in rows}
            own = None if mine is None else made[tuple(mine)]
        elif mine is None:
            return None
        else:
            late = self.backend == "gloo" and len(mine) > LATE_ABOVE
            with _named(self._name(label, mine)) as name, _connects_late() if late else contextlib.nullcontext():
                own = dist.new_group(mine, use_local_synchronization=True, **options)
            assert own is None or own.group_name == name
        if own is not None:
            self.lease.groups.append(own)
        return own

    def _name(self, label: str, ranks: Sequence[int]) -> str:
        """The same on every rank of the group, and on none of them a second time."""
        members = hashlib.sha1(str(sorted(ranks)).encode(), usedforsecurity=False).hexdigest()
        name = f"hf_dist:{self.lease.number}:{label}:{members[:16]}"
        self.lease.names[name] += 1
        return f"{name}:{self.lease.names[name]}"

    def _nccl_options(self, kind: Kind) -> dict[str, Any]:
        """With a device the communicator is made at once. Of an urgent group the kernels begin before those of a matrix
        product that is under way have all begun, instead of after them."""
        if self.backend != "nccl":
            return {}
        if kind == "plain":
            return {"device_id": self.device}
        c10d: Any = dist.distributed_c10d
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=kind == "urgent")
        if kind == "channel":
            options.config.max_ctas = _CHANNEL_CTAS
        options._timeout = self.timeout  # torch warns where it differs from the argument
        return {"device_id": self.device, "pg_options": options}


def _splits_default_group() -> bool:
    """Whether NCCL makes groups of the default one's communicator, in which then every rank of the job takes part.

    It does where whoever started torch.distributed gave it a device. Also where torch does not let us choose names.
    """
    c10d: Any = dist.distributed_c10d
    bound = getattr(c10d._get_default_group(), "bound_device_id", None) is not None
    return bound or not hasattr(c10d, "_process_group_name")


@contextlib.contextmanager
def _named(name: str) -> Iterator[str]:
    """Groups that are made inside have this name; see [Note: groups of own rows]."""
    c10d: Any = dist.distributed_c10d
    theirs = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield name
    finally:
        c10d._process_group_name = theirs


@contextlib.contextmanager
def _connects_late() -> Iterator[None]:
    """gloo's groups that are made inside connect two ranks at their first transfer."""
    variable = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(variable)
    os.environ[variable] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
