"""Process groups and axes: which rank makes which group, under which name, and when groups end.

[Note: groups of own rows] A rank makes only the groups that it belongs to, in the same order as all ranks. 4096 ranks in short
rows form thousands of rows. By default in torch, every rank takes part in making every group. Each one then blocks the whole
job if NCCL splits the default group (it does if the default group has a device: we pass none) or if TORCH_DIST_INIT_BARRIER
is set. torch can let only the members make a group, but names it by the number of groups in the process, which differs between
ranks; `_named` sets a name of ours.
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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_dist.dist.axes import AXES, EXPERTS, Axes

__all__ = ["FAKE", "GroupLease", "GroupMaker", "Kind", "MeshAxis", "leave_in_order", "num_groups", "plan_groups"]

_BLOCKING = ("dp", "world", "pp", "model", "data", "batch")
"""Views with blocking collectives at the same place of every rank's program. Views with the same lines share a group."""
_IN_LAYERS = ("tp", "cp", "ep")
"""Axes along which every rank of a line runs the same layers in the same order. They share the group of a view of `_BLOCKING`
that has the same lines: between two of its collectives lie whole passes."""
_TWO_GROUPS = ("shard", "edp")
"""Views with a second group for gradients. Views with the same lines share both groups."""
FAKE = "fake"
"""torch's backend without other processes: shows what one rank does and holds in a job of any size."""
Kind = Literal["plain", "urgent", "channel"]
"""Kind of a group: "urgent" for weights and gradients, "channel" between two pipeline stages, "plain" for all else."""
LATE_ABOVE = 64
"""gloo groups of more ranks connect two ranks lazily, at their first transfer. Otherwise each rank connects to every other: at
4096 ranks, that is 4096 sockets per process and some 100 MB that each reads from the store.
"""
_CHANNEL_CTAS = 4
"""GPU thread blocks that a transfer between pipeline stages may occupy, even while it waits; NCCL's own limit is 16 to 32."""


class GroupLease:
    """The process groups of a mesh. They end when the mesh and all of its axes are no longer referenced.

    Each group has two threads, one of which wakes a hundred times a second; a process that builds many engines would
    accumulate them.
    """

    def __init__(self, backend: str, number: int = 0) -> None:
        """`number`: of the mesh in this process, the same on every rank; part of the groups' names."""
        self.number = number
        self.names: Counter[str] = Counter()
        """Name -> number of groups made with these ranks and this label."""
        self.groups: list[dist.ProcessGroup] = []
        self.under_way: set[object] = set()
        """Collectives that were started but not waited for. The groups end after them: a slower rank still needs this rank's
        data."""
        # NCCL communicators live until the process ends: destroying one waits for all its ranks.
        self.is_gloo = backend == "gloo"
        if self.is_gloo:
            _leases.add(self)
            weakref.finalize(self, _give_back, self.groups, self.under_way).atexit = False


_leases: weakref.WeakSet[GroupLease] = weakref.WeakSet()
_FAREWELL = timedelta(seconds=10)
"""How long ending groups waits for slower ranks to receive transfers in flight."""


def _settle(under_way: set[Any]) -> None:
    until = time.monotonic() + _FAREWELL.total_seconds()
    while under_way and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # the peer failed, or left without receiving
            under_way.pop().complete(_FAREWELL)


@dataclass(frozen=True, eq=False)
class MeshAxis:
    """One axis of the mesh, as this process sees it."""

    name: str
    """Name of an axis or view (`axes.py`), or "control", "calls", "background", "holders" (of tied weights), and the like."""
    size: int
    """Number of processes along the axis."""
    rank: int
    """This process's coordinate on the axis."""
    group: dist.ProcessGroup | None
    """Group for weights and small data; None if this is the only rank, which makes every collective local."""
    reduce_group: dist.ProcessGroup | None = None
    """A second group of the same ranks for gradients, so that reductions do not queue behind all-gathers."""
    lease: GroupLease | None = field(default=None, repr=False)
    """Keeps the groups alive."""


def _give_back(groups: list[dist.ProcessGroup], under_way: set[object]) -> None:
    _settle(under_way)
    while groups and dist.is_initialized():
        with contextlib.suppress(ValueError, RuntimeError):  # already ended by destroy_process_group()
            dist.destroy_process_group(groups.pop())


@functools.cache  # once per process
def leave_in_order() -> None:
    """Join gloo's threads before the interpreter ends.

    Otherwise some exits abort ("terminate called without an active exception"), and the launcher reports a finished job as
    failed. Not for GPUs: it could wait for a collective that a failed rank never joins.
    """

    def leave() -> None:
        for lease in list(_leases):
            _settle(lease.under_way)
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


@dataclass(frozen=True)
class PlannedGroups:
    """The groups of one axis or view, before they are made."""

    name: str
    lines: list[list[int]]
    like: str | None
    """The axis with the same lines whose groups it shares; None if it gets its own."""
    two: bool
    """Whether it has a second group for gradients."""


def plan_groups(axes: Axes) -> Iterator[PlannedGroups]:
    """The groups of all axes and views, in the order in which every rank makes them. Pure arithmetic."""
    in_layers = tuple(name for name in _IN_LAYERS if axes.size(name) > 1)
    for names, two in ((_BLOCKING + in_layers, False), (_TWO_GROUPS, True)):
        made: list[tuple[list[list[int]], str]] = []
        for name in names:
            lines = axes.lines(name)
            like = next((first for others, first in made if others == lines), None)
            yield PlannedGroups(name, lines, like, two)
            if like is None:
                made.append((lines, name))
    for name in _others():
        if name not in (*_BLOCKING, *_TWO_GROUPS, *_IN_LAYERS) and axes.size(name) > 1:
            yield PlannedGroups(name, axes.lines(name), None, False)


def _others() -> tuple[str, ...]:
    """Axes with groups of their own. `dp_shard` and `cp_shard` need none: the package uses `shard`, which contains them."""
    return (*(name for name in AXES if name not in ("dp_shard", "cp_shard")), "cp", *EXPERTS)


def num_groups(axes: Axes) -> int:
    """Number of groups of several ranks that a rank belongs to, including the default group, excluding pipeline channels."""
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
        """Make every axis and view, by name. An axis of one rank needs no group. Collective over world."""
        found = {name: MeshAxis(name, 1, 0, None) for name in (*AXES, *_others()) if axes.size(name) == 1}
        for planned in plan_groups(axes):
            shared = found[planned.like] if planned.like is not None else None
            if shared is None or shared.group is None:
                shared = self.axis(planned.name, planned.lines, two=planned.two)
            found[planned.name] = replace(shared, name=planned.name) if planned.name in _IN_LAYERS else shared
        return found

    def axis(self, name: str, rows: list[list[int]], two: bool = False) -> MeshAxis:
        """Make one axis; `rows`: the global ranks of every line along it. Collective over world, with the same rows.

        `two`: make a second group for gradients. A rank outside of all rows gets an axis of size 0."""
        size = len(rows[0])
        mine = next((row for row in rows if self.rank in row), [])
        # A job of one process keeps its process group: NCCL with one rank then runs the same code as with many.
        if not dist.is_initialized() or (size == 1 and dist.get_world_size() > 1):
            return MeshAxis(name, size, mine.index(self.rank), None, None)
        group = self.one_of(rows, name, kind="urgent" if two else "plain")
        reduce_group = self.one_of(rows, name, kind="urgent") if two else group
        if not mine:
            return MeshAxis(name, 0, 0, None, None)
        return MeshAxis(name, size, mine.index(self.rank), group, reduce_group, self.lease)

    def connect(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Use each NCCL group once. Collective over their ranks, in the order in which every rank made its groups.

        NCCL sets up a group at its first use, which would otherwise fall into the first backward. There, a rank whose batch
        skips a unit has different kernels in flight, and the set-up could deadlock with one of them.
        """
        if self.backend != "nccl":
            return
        token = torch.zeros(1, device=self.device)
        for group in groups:
            if dist.get_backend(group) == "nccl":
                dist.all_reduce(token, group=group)
        torch.cuda.synchronize(self.device)

    def connected(self, name: str, rows: list[list[int]]) -> MeshAxis:
        """Like `axis`, for an axis made after the mesh; it is ready for use. Collective over world."""
        axis = self.axis(name, rows)
        self.connect([axis.group] if axis.group is not None else [])
        return axis

    def one_of(self, rows: list[list[int]], label: str, *, kind: Kind = "plain") -> dist.ProcessGroup | None:
        """A group of the row that contains this rank; None if no row does. Collective over world, with the same arguments.

        `label`: the purpose, part of the name. Groups are never shared between meshes: a dropped model may leave a gather in
        flight, whose data the next user would receive.
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
        """A name that is equal on every rank of the group and never used twice."""
        members = hashlib.sha1(str(sorted(ranks)).encode(), usedforsecurity=False).hexdigest()
        name = f"hf_dist:{self.lease.number}:{label}:{members[:16]}"
        self.lease.names[name] += 1
        return f"{name}:{self.lease.names[name]}"

    def _nccl_options(self, kind: Kind) -> dict[str, Any]:
        """Options for `new_group`. With a device, the communicator is made at once. An urgent group's kernels have priority:
        they start before the remaining blocks of a running matrix product."""
        if self.backend != "nccl":
            return {}
        if kind == "plain":
            return {"device_id": self.device}
        c10d: Any = dist.distributed_c10d
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=kind == "urgent")
        if kind == "channel":
            options.config.max_ctas = _CHANNEL_CTAS
        options._timeout = self.timeout  # torch warns if it differs from the argument
        return {"device_id": self.device, "pg_options": options}


def _splits_default_group() -> bool:
    """Whether every rank of the job must take part in making every group.

    True if NCCL splits the default group's communicator, which it does if torch.distributed was started with a device. Also
    True if this torch does not let us choose names.
    """
    c10d: Any = dist.distributed_c10d
    bound = getattr(c10d._get_default_group(), "bound_device_id", None) is not None
    return bound or not hasattr(c10d, "_process_group_name")


@contextlib.contextmanager
def _named(name: str) -> Iterator[str]:
    """Give groups made inside the block this name; see [Note: groups of own rows]."""
    c10d: Any = dist.distributed_c10d
    theirs = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield name
    finally:
        c10d._process_group_name = theirs


@contextlib.contextmanager
def _connects_late() -> Iterator[None]:
    """Make gloo groups created inside the block connect two ranks only at their first transfer."""
    variable = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(variable)
    os.environ[variable] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
