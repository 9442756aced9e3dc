"""The mesh of processes: named axes, their process groups, and one timeout for all groups."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.dist.axes import Axes
from hf_dist.dist.groups import FAKE, GroupLease, GroupMaker, MeshAxis, leave_in_order
from hf_dist.dist.launch import Launch, detect_launch
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT, job_store, own_address, prepare_start, release_port
from hf_dist.errors import Problem, TopologyError

__all__ = [
    "DEFAULT_TIMEOUT",
    "GroupLease",
    "MeshAxis",
    "ParallelMesh",
    "build_mesh",
    "device_is_busy",
    "job_store",
    "join_job",
    "leave_job",
    "own_address",
    "prepare_start",
    "sequence_number",
    "use_in_thread",
    "wait_for_job",
]

BACKGROUND_TIMEOUT = timedelta(days=1)
_gpu: torch.device | None = None
"""The GPU of the latest mesh, for threads without a current GPU of their own."""
_number = itertools.count(1)
"""Numbers the meshes of this process."""


@dataclass(frozen=True, eq=False)
class HostAxes:
    """All ranks over gloo, once for each purpose: one must not wait for another, nor meet it on a rank that does other work."""

    control: MeshAxis
    """For questions between hosts (has any rank been told to stop?) while GPUs compute."""
    background: MeshAxis
    """For the checkpoint-writing thread. Its timeout is long: a slow disk must not end the job."""
    calls: MeshAxis
    """To meet in calls that all must make (`collective_guard.py`). Had a rank that makes one alone met another collective, gloo
    would have ended the process: the messages have other sizes."""


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The axes of the job (`axes.py`) as this process sees them, with their process groups."""

    launch: Launch
    device: torch.device
    backend: str
    """nccl, gloo, fake, or none in a single process without a process group."""
    axes: Axes
    """Sizes, coordinates and lines of all ranks."""
    views: Mapping[str, MeshAxis]
    """Name of an axis or view -> this rank's line along it."""
    on_host: HostAxes
    """Groups for what hosts tell each other."""
    timeout: timedelta = field(default=DEFAULT_TIMEOUT)
    lease: GroupLease = field(default_factory=lambda: GroupLease("none"), repr=False)
    """Process groups that end with the mesh."""
    hosts: tuple[str, ...] = field(default=(), repr=False)
    """The host name of every rank."""
    replicas: MeshAxis | None = None
    """On a mesh from `one_replica`: the ranks that hold the same states in other replicas; else None."""
    near: MeshAxis | None = None
    """On such a mesh: all ranks of the replica; else None."""

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelMesh:
        # Process groups cannot be copied, and a copied model belongs to the same processes.
        return self

    def describe(self) -> str:
        """One line for the start-up report, such as `4 ranks = dp_replicate 2 x dp_shard 2, gloo on cpu`."""
        if self.world.size == 1:
            return f"one process on {self.device.type}, no communication"
        return f"{self.axes.describe()}, {self.backend} on {self.device.type}"

    @property
    def world(self) -> MeshAxis:
        """All ranks, for operations of the whole job such as checkpoints and agreement on the model."""
        return self.views["world"]

    @property
    def control(self) -> MeshAxis:
        """See `HostAxes`."""
        return self.on_host.control

    @property
    def background(self) -> MeshAxis:
        """See `HostAxes`."""
        return self.on_host.background

    @property
    def calls(self) -> MeshAxis:
        """See `HostAxes`."""
        return self.on_host.calls

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
    def tp(self) -> MeshAxis:
        """Ranks that hold slices of the same layers' weights."""
        return self.views["tp"]

    @property
    def model(self) -> MeshAxis:
        """Ranks that together hold one copy of the model."""
        return self.views["model"]

    @property
    def shard(self) -> MeshAxis:
        """Ranks that dense weights are sharded over."""
        return self.views["shard"]

    @property
    def cp(self) -> MeshAxis:
        """Ranks that compute on parts of the same sequences."""
        return self.views["cp"]

    def neighbours(self, size: int, along: str = "shard") -> MeshAxis | None:
        """This rank's block of `size` adjacent ranks `along` a view; None if a block is one rank or the whole line.

        Collective over world.
        """
        lines = self.axes.lines(along)
        if not 1 < size < len(lines[0]):
            return None
        rows = [line[start : start + size] for line in lines for start in range(0, len(line), size)]
        name = "neighbours" if along == "shard" else f"{size} neighbours on {along}"
        return self.groups.connected(name, rows)

    def hops(self, size: int = 0, along: str = "shard") -> tuple[MeshAxis, MeshAxis] | None:
        """(this rank's block of adjacent ranks `along` a view, ranks of this place in every block): two hops for reductions.

        `size`: ranks of a block; 0: those of a machine, if every machine of the line has as many. None if a block is one rank
        or the whole line. Collective over world. Raises `TopologyError` if the line is not a whole number of blocks."""
        lines = self.axes.lines(along)
        length = len(lines[0])
        size = size or self.axes.adjacent(along, self.hosts)
        if not 1 < size < length:
            return None
        if length % size:
            fix = f"Use a number that divides {length}, or 1 for one hop."
            raise TopologyError(
                Problem("hf_dist.wires.machine", str(size), f"does not divide the {length} ranks of a shard", fix)
            )
        blocks = [line[start : start + size] for line in lines for start in range(0, length, size)]
        across = [line[place::size] for line in lines for place in range(size)]
        return self.groups.connected(f"machine on {along}", blocks), self.groups.connected(
            f"machines on {along}", across
        )

    def holders(self, stages: Sequence[int]) -> MeshAxis:
        """The ranks at pipeline coordinates `stages` on this rank's pipeline; for weights that several stages hold.

        Collective over world: every rank calls it, even at other coordinates, where the axis has size 0.
        """
        return self.groups.connected("holders", [[line[stage] for stage in stages] for line in self.axes.lines("pp")])

    def one_replica(self) -> ParallelMesh:
        """The mesh for a replica that trains alone: `dp_replicate` has one rank; `dp` and `data` cover only the replica.

        `world` and `axes` remain those of the job, for operations of all replicas. With one replica, returns this mesh.
        Collective over world.
        """
        if self.axes.size("dp_replicate") == 1:
            return self
        dp = self.views["shard"] if self.axes.size("cp_replicate") == 1 else self.cp
        data = dp if self.cp.size == 1 else self.groups.connected("dp_shard", self.axes.lines("dp_shard"))
        near = dp
        if self.dp.size != self.world.size:
            near = self.groups.connected("replica", self.axes.lines("replica"))
        alone = MeshAxis("dp_replicate", 1, 0, None)
        views = {**self.views, "dp": dp, "data": data, "dp_replicate": alone}
        return replace(self, views=views, replicas=self.views["dp_replicate"], near=near)

    @property
    def replica(self) -> int:
        """This rank's replica number on a mesh from `one_replica`; else 0."""
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def together(self) -> MeshAxis:
        """Ranks that step together and may communicate at every step: all, or those of the replica."""
        return self.near or self.world

    @property
    def groups(self) -> GroupMaker:
        """Makes further groups, which end with the mesh."""
        return GroupMaker(self.world.rank, self.backend, self.timeout, self.lease, self.device)

    def ranks_by_host(self) -> dict[str, list[int]]:
        """Machine -> its ranks, ordered by first rank."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    def hosts_along(self, axis: str) -> int:
        """Number of machines on this rank's line along an axis or view."""
        return len({self.hosts[rank] for rank in self.axes.line(axis, self.world.rank)}) if self.hosts else 1


def build_mesh(
    *,
    axes: Callable[[int], Axes] = Axes.of,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    facts: Mapping[str, str] | None = None,
) -> ParallelMesh:
    """Make the mesh. Collective: every process of the job calls it, in the same order relative to other meshes.

    `axes`: maps the number of ranks to the axes; must give the same result on every rank.
    `facts`: settings that must be equal on every rank (the configuration); compared before any group is made.
    Starts `torch.distributed` if needed: NCCL on GPUs, gloo on CPUs. A process without a launcher stays alone.
    Raises any error of `axes`, and `TopologyError` if `facts` differ.
    """
    launch, chosen = join_job(device, timeout)
    ready = dist.is_initialized()
    if ready and chosen.type == "cpu":
        leave_in_order()
    world, rank = (dist.get_world_size(), dist.get_rank()) if ready else (1, 0)
    if world != launch.world_size and launch.launcher != "none":
        raise TopologyError(
            f"the launcher started {launch.world_size} processes (WORLD_SIZE) but torch.distributed has {world}: each "
            "process would train alone on the same data. On a machine without GPUs set ACCELERATE_USE_CPU=true."
        )
    hosts = _meet(facts or {}, world)
    cut = axes(world)
    backend = _backend(chosen) if ready else "none"
    groups = GroupMaker(rank, backend, timeout, GroupLease(backend, next(_number)), chosen)
    gloo = replace(groups, backend=FAKE if backend == FAKE else "gloo")
    everyone = cut.lines("world")
    views = groups.views(cut)
    control = gloo.axis("control", everyone)
    background = replace(gloo, timeout=BACKGROUND_TIMEOUT).axis("background", everyone)
    on_host = HostAxes(control, background, gloo.axis("calls", everyone))
    groups.connect(groups.lease.groups)
    if ready:
        # Without this, a rank that drops its mesh at once would close connections that others are still setting up.
        dist.barrier(device_ids=[chosen.index] if dist.get_backend() == "nccl" else None)
    return ParallelMesh(launch, chosen, backend, cut, views, on_host, timeout, groups.lease, hosts)


def join_job(device: torch.device | str | None, timeout: timedelta) -> tuple[Launch, torch.device]:
    """Start `torch.distributed` if a launcher started several processes; returns this process's place and its device.

    Collective: every process of the job calls it.
    """
    global _gpu
    launch = detect_launch()
    chosen = _choose_device(launch, device)
    prepare_start()  # before set_device, which starts CUDA: its number of queues is read from the environment then
    if chosen.type == "cuda":
        _gpu = chosen
        torch.cuda.set_device(chosen)
    if launch.world_size > 1 and not dist.is_initialized():
        # No device_id, as in accelerate: with it, the whole job would have to take part in making every later group.
        dist.init_process_group(backend="nccl" if chosen.type == "cuda" else "gloo", timeout=timeout)
    release_port()
    return launch, chosen


def leave_job() -> None:
    """End torch.distributed in this process once every rank has called it. Collective; a no-op if it was not started.

    NCCL communicators, even those of dropped meshes, end once the GPU has finished their work.
    """
    if dist.is_initialized():
        wait_for_job()
        dist.destroy_process_group()


def wait_for_job() -> None:
    """Wait until every rank has called it and its GPU is idle, so that process groups may end. Collective."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl" and _gpu is not None:
        dist.barrier(device_ids=[_gpu.index])
        torch.cuda.synchronize(_gpu)
    else:
        dist.barrier()


def sequence_number() -> int:
    """Number of collectives on the default group so far, including other libraries'. Local; from any thread."""
    if not dist.is_initialized():
        return 0
    with contextlib.suppress(RuntimeError, ValueError):  # another thread may be ending it
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0


def use_in_thread(device: torch.device) -> None:
    """Call first in each of our threads that may use CUDA. Local.

    The current GPU is a property of the thread and starts as GPU 0. On other local ranks, the thread's first call would create
    a context there, half a gigabyte per rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_is_busy(ask: bool) -> bool:
    """Whether this process's GPU has unfinished work; False if `ask` is False, or without a mesh on a GPU.

    Call it from a separate thread. Pass `ask=False` while a CUDA graph may be captured: the query would end the capture.
    """
    if not ask or _gpu is None or not torch.cuda.is_initialized():
        return False
    use_in_thread(_gpu)
    return not torch.cuda.default_stream(_gpu).query()


def _backend(device: torch.device) -> str:
    """The backend to name for every group. A default group made elsewhere may have one per device, or report "undefined"."""
    if dist.get_backend() == FAKE:
        return FAKE
    return "gloo" if device.type == "cpu" or dist.get_backend() == "gloo" else "nccl"


def _meet(facts: Mapping[str, str], world: int) -> tuple[str, ...]:
    """The host name of every rank; raises `TopologyError` if `facts` differ. Collective over the default group."""
    host = socket.gethostname()
    if not dist.is_initialized() or world == 1:
        return (host,)
    digest = hashlib.sha256(str(sorted(facts.items())).encode()).hexdigest()
    met = [("", "")] * world
    dist.all_gather_object(met, (host, digest))
    if len({theirs for _, theirs in met}) > 1:
        _refuse_differences(facts, world)
    return tuple(name for name, _ in met)


def _refuse_differences(facts: Mapping[str, str], world: int) -> None:
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
    # Without a launcher, accelerate passes plain "cuda", but `torch.cuda.set_device` needs an index.
    return torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))
