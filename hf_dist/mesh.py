"""The mesh of processes: named axes, their process groups, one timeout for all of them."""

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

from hf_dist.axes import Axes
from hf_dist.errors import TopologyError
from hf_dist.groups import FAKE, GroupLease, GroupMaker, MeshAxis, leave_in_order
from hf_dist.launch import Launch, detect_launch
from hf_dist.rendezvous import DEFAULT_TIMEOUT, job_store, own_address, prepare_start

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
"""That of the mesh that was made last, for threads which have none."""
_number = itertools.count(1)
"""Of the meshes of this process."""


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
    """Process groups that end with the mesh."""
    hosts: tuple[str, ...] = field(default=(), repr=False)
    """The machine of every rank."""
    replicas: MeshAxis | None = None
    """The ranks that hold the same in other replicas, of a mesh that is one replica (`one_replica`)."""
    near: MeshAxis | None = None
    """All ranks of the replica, of such a mesh."""

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
    def tp(self) -> MeshAxis:
        """Ranks between which the weights of a layer are cut."""
        return self.views["tp"]

    @property
    def model(self) -> MeshAxis:
        """Ranks that hold one copy of the model between them."""
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
        """The `size` ranks beside each other `along` a view that this rank is one of; None where that is one, or all of them.

        Collective over world.
        """
        lines = self.axes.lines(along)
        if not 1 < size < len(lines[0]):
            return None
        rows = [line[start : start + size] for line in lines for start in range(0, len(line), size)]
        name = "neighbours" if along == "shard" else f"{size} neighbours on {along}"
        return self.groups.connected(name, rows)

    def holders(self, stages: Sequence[int]) -> MeshAxis:
        """The ranks of some pipeline coordinates that have this rank's data; for weights that several stages hold.

        Collective over world: every rank calls it, also those that are not among them (they get an axis of size 0).
        """
        return self.groups.connected("holders", [[line[stage] for stage in stages] for line in self.axes.lines("pp")])

    def one_replica(self) -> ParallelMesh:
        """The mesh as what trains a replica alone sees it: `dp_replicate` has one rank, `dp` and `data` end at the replica.

        `world` and `axes` stay those of the job, for what all replicas do together. The mesh itself where there is one
        replica. Collective over world.
        """
        if self.axes.size("dp_replicate") == 1:
            return self
        shard = self.views["shard"]
        data = shard if self.cp.size == 1 else self.groups.connected("dp_shard", self.axes.lines("dp_shard"))
        near = shard
        if self.axes.size("dp_replicate") * shard.size != self.world.size:
            near = self.groups.connected("replica", self.axes.lines("replica"))
        alone = MeshAxis("dp_replicate", 1, 0, None)
        views = {**self.views, "dp": shard, "data": data, "dp_replicate": alone}
        return replace(self, views=views, replicas=self.views["dp_replicate"], near=near)

    @property
    def replica(self) -> int:
        """Which replica this rank is of, on a mesh that is one; else 0."""
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def together(self) -> MeshAxis:
        """Ranks that may be asked at every step: all, or those of the replica."""
        return self.near or self.world

    @property
    def groups(self) -> GroupMaker:
        """Makes more groups, which end with the mesh."""
        return GroupMaker(self.world.rank, self.backend, self.timeout, self.lease, self.device)

    def ranks_by_host(self) -> dict[str, list[int]]:
        """Machine -> its ranks, in the order of their first."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    def hosts_along(self, axis: str) -> int:
        """Machines that this rank's line along an axis or view reaches."""
        return len({self.hosts[rank] for rank in self.axes.line(axis, self.world.rank)}) if self.hosts else 1


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
    on_host = replace(groups, backend=FAKE if backend == FAKE else "gloo")
    everyone = cut.lines("world")
    views = groups.views(cut)
    control = on_host.axis("control", everyone)
    background = replace(on_host, timeout=BACKGROUND_TIMEOUT).axis("background", everyone)
    groups.connect(groups.lease.groups)
    if ready:
        # A rank that drops its mesh at once would close connections that others are still making.
        dist.barrier(device_ids=[chosen.index] if dist.get_backend() == "nccl" else None)
    return ParallelMesh(launch, chosen, backend, cut, views, control, background, timeout, groups.lease, hosts)


def join_job(device: torch.device | str | None, timeout: timedelta) -> tuple[Launch, torch.device]:
    """Start `torch.distributed` if nobody did and a launcher started several processes; who this one is, and its device.

    Every process of the job calls it.
    """
    global _gpu
    launch = detect_launch()
    chosen = _choose_device(launch, device)
    if chosen.type == "cuda":
        _gpu = chosen
        torch.cuda.set_device(chosen)
    prepare_start()
    if launch.world_size > 1 and not dist.is_initialized():
        # No device_id, as accelerate: with one torch makes every later group by a call that the whole job takes part in.
        dist.init_process_group(backend="nccl" if chosen.type == "cuda" else "gloo", timeout=timeout)
    return launch, chosen


def leave_job() -> None:
    """End torch.distributed in this process when every rank is here. Collective; nothing happens where it was not started.

    NCCL's communicators, those of meshes that are gone too, end when the GPU is done with what was started on them.
    """
    if dist.is_initialized():
        wait_for_job()
        dist.destroy_process_group()


def wait_for_job() -> None:
    """Wait until every rank is here and its GPU done with what was started: process groups may end then. Collective."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl" and _gpu is not None:
        dist.barrier(device_ids=[_gpu.index])
        torch.cuda.synchronize(_gpu)
    else:
        dist.barrier()


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
    if dist.get_backend() == FAKE:
        return FAKE
    return "gloo" if device.type == "cpu" or dist.get_backend() == "gloo" else "nccl"


def _meet(facts: Mapping[str, str], world: int) -> tuple[str, ...]:
    """The machine of every rank, once all have the same facts. Collective over the default group."""
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
    # accelerate, too, says "cuda" where there is no launcher; `torch.cuda.set_device` wants a number.
    return torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))
