"""The mesh of processes: named axes, their process groups, one timeout for all of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.axes import AXES, EXPERTS, Axes
from hf_dist.errors import TopologyError
from hf_dist.launch import Launch, detect_launch

DEFAULT_TIMEOUT = timedelta(minutes=30)
BACKGROUND_TIMEOUT = timedelta(days=1)
_BLOCKING = ("dp", "world", "pp", "model", "data", "batch")
"""Views for what every rank waits for at the same place of its program: those with the same lines share a group."""
_TWO_GROUPS = ("shard", "edp")
"""Views with a second group for gradients; they share their groups where they have the same lines."""
_FAKE = "fake"
"""torch's backend without other processes: what one rank of a job of any size does and holds."""
_gpu: torch.device | None = None
"""That of the mesh that was made last, for threads which have none."""


class GroupLease:
    """Process groups of a mesh; they end when neither the mesh nor one of its axes is in use any more.

    Each has two threads, one of which wakes a hundred times a second: a process that builds many engines would drown in them.
    """

    def __init__(self, backend: str) -> None:
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


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The axes of the job (`axes.py`), as this process sees them, with their process groups."""

    launch: Launch
    device: torch.device
    backend: str
    """nccl, gloo, fake, or none in a single process without a process group."""
    axes: Axes
    """Sizes, coordinates and lines of all ranks."""
    views: Mapping[str, MeshAxis]
    """What this rank takes part in, by the name of an axis or view."""
    control: MeshAxis
    """All ranks over gloo, for what the host asks of the others (has anyone been told to stop?) while GPUs compute."""
    background: MeshAxis
    """All ranks over gloo, for the thread that writes checkpoints; a slow disk is no reason to end the job."""
    timeout: timedelta = field(default=DEFAULT_TIMEOUT)
    lease: GroupLease = field(default_factory=lambda: GroupLease("none"), repr=False)
    """Process groups that end with the mesh; who makes more for it adds them here."""

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelMesh:
        # Process groups cannot be copied, and a copied model belongs to the same processes.
        return self

    def describe(self) -> str:
        """One line for the start-up report, such as `4 ranks = dp_replicate 2 x dp_shard 2, gloo on cpu`."""
        return f"{self.axes.describe()}, {self.backend} on {self.device.type}"

    @property
    def world(self) -> MeshAxis:
        """All ranks: what concerns the whole job, such as checkpoints and the agreement on the model."""
        return self.views["world"]

    @property
    def pp(self) -> MeshAxis:
        """Pipeline stages."""
        return self.views["pp"]

    @property
    def dp(self) -> MeshAxis:
        """Ranks that hold the same part of the model; losses, gradients and norms are combined over them."""
        return self.views["dp"]

    @property
    def data(self) -> MeshAxis:
        """Ranks that read different rows."""
        return self.views["data"]

    @property
    def model(self) -> MeshAxis:
        """Ranks that hold one copy of the model between them."""
        return self.views["model"]

    @property
    def shard(self) -> MeshAxis:
        """Ranks that dense weights are sharded over."""
        return self.views["shard"]

    def holders(self, stages: Sequence[int]) -> MeshAxis:
        """The ranks of some pipeline coordinates that have this rank's data; for weights that several stages hold.

        Collective over world: every rank calls it, also those that are not among them (they get an axis of size 0).
        """
        rows = [[line[stage] for stage in stages] for line in self.axes.lines("pp")]
        groups = _Groups(self.world.rank, self.backend, self.timeout, self.lease, self.device)
        return groups.axis("holders", rows)


def build_mesh(
    *,
    axes: Callable[[int], Axes] = Axes.of,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    facts: Mapping[str, str] | None = None,
) -> ParallelMesh:
    """Make the mesh; every process of the job must call it, in the same order as other meshes.

    `axes`: what the number of ranks is cut into; asked when that is known, must be the same on every rank.
    `facts`: settings that must be equal on every rank (the configuration); compared before any group is made from them.
    Starts `torch.distributed` if nobody did: NCCL on GPUs, gloo on CPUs; a process without a launcher stays alone.
    Raises what `axes` raises, and `TopologyError` when `facts` differ.
    """
    launch = detect_launch()
    chosen = _choose_device(launch, device)
    if chosen.type == "cuda":
        global _gpu
        _gpu = chosen
        torch.cuda.set_device(chosen)
    leave_agent_store()
    if launch.world_size > 1 and not dist.is_initialized():
        if chosen.type == "cuda":
            dist.init_process_group(backend="nccl", timeout=timeout, device_id=chosen)
        else:
            dist.init_process_group(backend="gloo", timeout=timeout)
    ready = dist.is_initialized()
    if ready and chosen.type == "cpu":
        _leave_in_order()
    world, rank = (dist.get_world_size(), dist.get_rank()) if ready else (1, 0)
    if world != launch.world_size and launch.launcher != "none":
        raise TopologyError(
            f"the launcher started {launch.world_size} processes (WORLD_SIZE) but torch.distributed has {world}: each "
            "process would train alone on the same data. On a machine without GPUs set ACCELERATE_USE_CPU=true."
        )
    _check_agreement(facts or {}, world)
    cut = axes(world)
    backend = _backend(chosen) if ready else "none"
    groups = _Groups(rank, backend, timeout, GroupLease(backend), chosen)
    on_host = replace(groups, backend=_FAKE if backend == _FAKE else "gloo")
    everyone = cut.lines("world")
    views = groups.views(cut)
    control = on_host.axis("control", everyone)
    background = replace(on_host, timeout=BACKGROUND_TIMEOUT).axis("background", everyone)
    if backend == "nccl":
        groups.connect()
    if ready:
        # A rank that drops its mesh at once would close connections that others are still making.
        dist.barrier(device_ids=[chosen.index] if dist.get_backend() == "nccl" else None)
    return ParallelMesh(launch, chosen, backend, cut, views, control, background, timeout, groups.lease)


def _give_back(groups: list[dist.ProcessGroup], under_way: set[Any]) -> None:
    _settle(under_way)
    while groups and dist.is_initialized():
        with contextlib.suppress(ValueError, RuntimeError):  # ended already, by destroy_process_group()
            dist.destroy_process_group(groups.pop())


def leave_agent_store() -> None:
    """Let the ranks of this start meet in a store of their own. Every rank calls it before there is a process group.

    torchrun keeps one store for all its restarts (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`), and groups that
    are made after a restart read the addresses of processes that are gone. Nothing changes under other launchers. Raises
    `TopologyError` when the ranks do not find each other.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1 or dist.is_initialized():
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    port = _agree_on_port(store, int(os.environ["RANK"]), world)
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def _agree_on_port(store: dist.Store, rank: int, world: int) -> int:
    """A free port of rank 0's machine, told through a store that may hold answers of an earlier start.

    hello (a new word of each rank) -> offer (port and all hellos, again when one was old) -> ack (the offer, by the ranks that
    find their word in it) -> go (the offer that all have acknowledged).
    """
    hello = uuid.uuid4().hex
    store.set(f"hf_dist/hello/{rank}", hello)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    deadline = time.monotonic() + DEFAULT_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0:
            hellos = [read(f"hf_dist/hello/{r}") for r in range(world)]
            offer = json.dumps([port, hellos])
            store.set("hf_dist/offer", offer)
            if all(hellos) and all(read(f"hf_dist/ack/{r}") == offer for r in range(1, world)):
                store.set("hf_dist/go", offer)
                return int(port)
        else:
            offer = read("hf_dist/offer")
            if hello in offer:
                store.set(f"hf_dist/ack/{rank}", offer)
                if read("hf_dist/go") == offer:
                    return int(json.loads(offer)[0])
        time.sleep(0.02)
    raise TopologyError(f"rank {rank} did not find the {world} ranks of this job within {DEFAULT_TIMEOUT}")


def leave_job() -> None:
    """End torch.distributed in this process when every rank is here. Collective; nothing happens where it was not started.

    NCCL's communicators, those of meshes that are gone too, end when the GPU is done with what was started on them.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl" and _gpu is not None:
        dist.barrier(device_ids=[_gpu.index])
        torch.cuda.synchronize(_gpu)
    else:
        dist.barrier()
    dist.destroy_process_group()


def job_store() -> dist.Store | None:
    """The store through which the ranks of this job found each other; None before they did, or for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def own_address() -> str:
    """The address of this machine as the other ranks reach it: that of the interface towards rank 0."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if int(os.environ.get("RANK", "0")) == 0:
        return master
    family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])


def sequence_number() -> int:
    """Collectives of the default group so far, those of other libraries too. Local; any thread may ask."""
    if not dist.is_initialized():
        return 0
    with contextlib.suppress(RuntimeError, ValueError):  # another thread may be ending it
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0


def use_in_thread(device: torch.device) -> None:
    """What a thread of ours does first if it may touch CUDA. Local.

    The current GPU is each thread's own, and GPU 0 in a new one: on other local ranks its first call would make a context
    there, half a gigabyte for each of them.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_is_busy(ask: bool) -> bool:
    """Whether this process's GPU has work that is not finished; False if not to `ask`, or without a mesh on a GPU.

    For a thread of its own. Not to be asked while a graph may be captured: that would end the capture.
    """
    if not ask or _gpu is None or not torch.cuda.is_initialized():
        return False
    use_in_thread(_gpu)
    return not torch.cuda.default_stream(_gpu).query()


def _backend(device: torch.device) -> str:
    """Named for every group: a default group made elsewhere may have one backend per device, or call it undefined."""
    if dist.get_backend() == _FAKE:
        return _FAKE
    return "gloo" if device.type == "cpu" or dist.get_backend() == "gloo" else "nccl"


@functools.cache  # once per process
def _leave_in_order() -> None:
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


def _check_agreement(facts: Mapping[str, str], world: int) -> None:
    if not dist.is_initialized() or world == 1:
        return
    everyone: list[Mapping[str, str]] = [{}] * world
    dist.all_gather_object(everyone, dict(facts))
    lines = []
    for key in sorted(set().union(*everyone)):
        for rank, theirs in enumerate(everyone):
            if theirs.get(key) != everyone[0].get(key):
                lines.append(
                    f"{key}: {everyone[0].get(key, 'not set')} on rank 0, {theirs.get(key, 'not set')} on rank {rank}"
                )
                break
    if lines:
        raise TopologyError(
            "the ranks were started with different settings:\n- " + "\n- ".join(lines[:20]) + "\nGive every rank the "
            "same configuration file and arguments (on several machines: check that each has the same file)."
        )


def _choose_device(launch: Launch, device: torch.device | str | None) -> torch.device:
    if device is None:
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        device = "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"
    chosen = torch.device(device)
    if chosen.type != "cuda" or chosen.index is not None:
        return chosen
    # accelerate, too, says "cuda" where there is no launcher; `torch.cuda.set_device` wants a number.
    return torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))


@dataclass(frozen=True)
class _Groups:
    """Makes the process groups of one mesh, all with the same backend and timeout."""

    rank: int
    backend: str
    timeout: timedelta
    lease: GroupLease
    device: torch.device

    def views(self, axes: Axes) -> dict[str, MeshAxis]:
        """Every axis and view, in one order on all ranks. An axis of one rank needs no group."""
        found: dict[str, MeshAxis] = {}
        for names, two in ((_BLOCKING, False), (_TWO_GROUPS, True)):
            made: list[tuple[list[list[int]], MeshAxis]] = []
            for name in names:
                lines = axes.lines(name)
                same = next((axis for others, axis in made if others == lines and axis.group is not None), None)
                found[name] = same or self.axis(name, lines, two=two)
                made.append((lines, found[name]))
        for name in (*AXES, *EXPERTS):
            # Every rank of `dp_shard` is one of `shard`, which is what is asked for.
            if name not in found and name != "dp_shard":
                alone = axes.size(name) == 1
                found[name] = MeshAxis(name, 1, 0, None) if alone else self.axis(name, axes.lines(name))
        return found

    def axis(self, name: str, rows: list[list[int]], two: bool = False) -> MeshAxis:
        """`rows`: the global ranks of every line along this axis. Every process makes every group, as torch demands."""
        size = len(rows[0])
        mine = next((row for row in rows if self.rank in row), [])
        # A job of one process with a process group keeps it: NCCL with one rank then runs the very code of many ranks.
        if not dist.is_initialized() or (size == 1 and dist.get_world_size() > 1):
            return MeshAxis(name, size, mine.index(self.rank), None, None)
        group = self._make(rows, mine, urgent=two)
        if not mine:
            return MeshAxis(name, 0, 0, None, None)
        reduce_group = self._make(rows, mine, urgent=two) if two else group
        return MeshAxis(name, size, mine.index(self.rank), group, reduce_group, self.lease)

    def connect(self) -> None:
        """Use each NCCL group of the lease once. Collective over world, in the order in which every rank made its groups.

        What NCCL sets up at a group's first use would else come in the middle of the first backward. A rank whose batch skips a
        unit has other kernels in flight there, and the set-up may wait for one of them whose partner waits for the set-up.
        """
        token = torch.zeros(1, device=self.device)
        for group in self.lease.groups:
            if dist.get_backend(group) == "nccl":
                dist.all_reduce(token, group=group)
        torch.cuda.synchronize(self.device)

    def _make(self, rows: list[list[int]], mine: list[int], *, urgent: bool) -> dist.ProcessGroup | None:
        # Never shared with another mesh: a model that is dropped may leave a gather in flight, which the next one would get.
        groups = [
            dist.new_group(row, timeout=self.timeout, backend=self.backend, **self._nccl_options(urgent))
            for row in rows
        ]
        if not mine:
            return None
        own = groups[rows.index(mine)]
        self.lease.groups.append(own)
        return own

    def _nccl_options(self, urgent: bool) -> dict[str, Any]:
        """With a device the communicator is made at once. Of an `urgent` group the kernels begin before those of a matrix
        product that is under way have all begun, instead of after them."""
        if self.backend != "nccl":
            return {}
        if not urgent:
            return {"device_id": self.device}
        c10d: Any = dist.distributed_c10d
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.timeout  # torch warns where it differs from the argument
        return {"device_id": self.device, "pg_options": options}
