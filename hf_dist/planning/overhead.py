"""GPU memory of a rank that belongs to no tensor: CUDA's context, cuBLAS workspaces and kernels, NCCL communicators.

Neither a planned peak nor torch's allocator includes these bytes. The figures are estimates until they are measured: a context
by `measured_base` on a machine with a GPU, everything by `measured` in a running rank.
"""

from __future__ import annotations

import os
import subprocess

import torch

from hf_dist.config import DistConfig
from hf_dist.dist.axes import RANKS_PER_MACHINE, Axes
from hf_dist.dist.groups import num_groups
from hf_dist.sharding.placement import placements_for
from hf_dist.sharding.wires import wires_for

__all__ = [
    "CHANNEL",
    "COMMUNICATOR",
    "CONTEXT",
    "WORKSPACES",
    "estimated",
    "groups_after_mesh",
    "measured",
    "measured_base",
    "num_channels",
]

CONTEXT = 500_000_000
"""Per process: the reported figure for NVIDIA's data-centre cards."""
WORKSPACES = 200_000_000
"""cuBLAS workspaces, and kernels loaded at their first use."""
COMMUNICATOR = 200_000_000
"""Per process group: 0.1 to 0.4 GB, depending on the number of channels."""
CHANNEL = 50_000_000
"""Per direction between two stages, whose communicators are made small (`dist/groups.py`)."""


def estimated(config: DistConfig, axes: Axes, of_model: int = 0, base: int | None = None) -> int:
    """Bytes of a GPU rank under `config`, whose mesh has these `axes`. Pure.

    `of_model`: number of groups that depend on the model (`Planner.groups_of_model`); `base`: measured bytes of context and
    workspaces.
    """
    groups = num_groups(axes) + groups_after_mesh(config, axes) + of_model
    rest = groups * COMMUNICATOR + num_channels(config) * CHANNEL
    return (CONTEXT + WORKSPACES if base is None else base) + rest


def num_channels(config: DistConfig) -> int:
    """Channels of a rank in the middle of a pipeline: in and out, forward and backward. Pure."""
    pipeline = config.pipeline
    if pipeline.stages == 1:
        return 0
    # With several stages per rank, the last rank also sends to the first.
    return 2 * min(2, pipeline.stages - 1 if pipeline.virtual_stages == 1 else pipeline.stages)


def groups_after_mesh(config: DistConfig, axes: Axes) -> int:
    """A rank's groups for `config` in addition to those of the mesh (`groups.num_groups`). Pure."""
    shard, alone = axes.size("shard"), axes.size("dp_replicate") > 1 and config.local_sgd.enabled
    neighbours = placements_for(config).second  # with a second copy of the weights
    count = int(1 < neighbours < shard)
    count += 2 * (wires_for(config).near(axes, RANKS_PER_MACHINE) > 1)
    if alone:  # created by `ParallelMesh.one_replica`
        count += axes.size("cp") > 1 and axes.size("dp_shard") > 1
        count += axes.size("dp") != axes.size("world")
    return count


def measured(device: torch.device) -> int | None:
    """Bytes in use on the device outside torch's allocator, including other programs; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def measured_base() -> int | None:
    """Bytes of a context and of a matrix product's workspaces on the first GPU. This process keeps the context.

    None without a GPU, or if the previous use is unknown.
    """
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        return None
    before = _used_nbytes()
    if before is None:
        return None
    matrix = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    after = measured(torch.device("cuda", 0))
    return None if after is None or after <= before else after - before


def _used_nbytes() -> int | None:
    """Bytes used on the first visible GPU by all programs, from the driver's tool, without creating a context."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", first]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(said) << 20 if said.isdigit() else None
