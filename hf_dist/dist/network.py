"""Describes a job's network in words: machines, traffic between them, NCCL, and the variables that matter for it."""

from __future__ import annotations

import os
from collections import Counter

import torch

from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.rendezvous import CONNECTIONS, interface_of, own_address

__all__ = ["allocator", "connections", "describe", "interface", "machines", "nccl_version", "shard_lines"]

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def describe(mesh: ParallelMesh) -> list[str]:
    """Lines for the start-up report; empty for one machine without GPUs. Local."""
    on_gpu = mesh.device.type == "cuda"
    if not on_gpu and len(set(mesh.hosts)) < 2:
        return []
    lines = [machines(mesh), *shard_lines(mesh)]
    if mesh.backend == "nccl":
        lines.append(f"NCCL {nccl_version()}, first contact over {interface()}")
    elif mesh.world.size > 1:
        lines.append(f"{mesh.backend} over {interface()}")
    return [*lines, f"{allocator()}; {connections()}"] if on_gpu else lines


def machines(mesh: ParallelMesh) -> str:
    """Text such as `4 machines with 8 ranks each`. Local."""
    ranks = mesh.ranks_by_host()
    counts = Counter(len(found) for found in ranks.values())
    if len(ranks) <= 1:
        return f"1 machine, {mesh.world.size} rank{'s' if mesh.world.size > 1 else ''}"
    if len(counts) == 1:
        size = next(iter(counts))
        return f"{len(ranks)} machines with {size} rank{'s' if size > 1 else ''} each"
    return f"{len(ranks)} machines with {', '.join(f'{n} x {size}' for size, n in sorted(counts.items()))} ranks"


def shard_lines(mesh: ParallelMesh) -> list[str]:
    """Lines on whether all-gathers of weights cross machines, and how to avoid it if possible. Local."""
    size, reach = mesh.shard.size, mesh.hosts_along("shard")
    if size == 1 or len(set(mesh.hosts)) < 2:
        return []
    if reach == 1:
        return [f"dp_shard: {size} ranks on one machine"]
    lines = [f"dp_shard: {size} ranks on {reach} machines; gathers and reductions cross between them"]
    fewest = min(len(ranks) for ranks in mesh.ranks_by_host().values())
    if size <= fewest:
        lines.append(
            f"a machine has room for all {size}, but its ranks are not neighbours: number them machine by machine (torchrun "
            "does; srun --distribution=block, mpirun --map-by core)"
        )
    return lines


def nccl_version() -> str:
    """Version of the NCCL library that torch uses."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def interface() -> str:
    """The network interface over which ranks find each other; data may travel over InfiniBand or NVLink."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if os.environ.get(variable):
            return f"{os.environ[variable]} ({variable})"
    try:
        return interface_of(own_address()) or "an interface of NCCL's choice"
    except OSError:
        return "an interface of NCCL's choice"


def allocator() -> str:
    """Text on whether the allocator can reuse freed memory for other sizes (expandable segments)."""
    settings = ",".join(os.environ.get(variable, "") for variable in _ALLOCATOR).replace(" ", "").lower()
    if "expandable_segments:true" in settings:
        return "expandable_segments on"
    return f"expandable_segments off ({_ALLOCATOR[-1]}=expandable_segments:True saves memory that is lost to fragments)"


def connections() -> str:
    """Text on the number of hardware queues for CUDA streams."""
    return f"{CONNECTIONS} {os.environ.get(CONNECTIONS, 'unset (8)')}"
