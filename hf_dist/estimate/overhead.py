"""What a rank takes of its GPU beside tensors: CUDA's context, workspaces and kernels of cuBLAS, NCCL's communicators.

No tensor's bytes, so neither a planned peak nor torch's allocator has them. The figures are estimates until they are measured:
a context by `measured_base` on a machine with a GPU, all of it by `measured` in a running rank.
"""

from __future__ import annotations

import os
import subprocess

import torch

from hf_dist.axes import Axes
from hf_dist.config import DistConfig
from hf_dist.groups import num_groups
from hf_dist.sharding.placement import placements_for

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
"""Of one process: what NVIDIA's data-centre cards are said to need."""
WORKSPACES = 200_000_000
"""cuBLAS's, and kernels that are loaded at their first use."""
COMMUNICATOR = 200_000_000
"""Of one group; 0.1 to 0.4 GB, by the number of its channels."""
CHANNEL = 50_000_000
"""Of one direction between two stages, whose communicator is made small (`groups.py`)."""


def estimated(config: DistConfig, axes: Axes, of_model: int = 0, base: int | None = None) -> int:
    """Bytes of a rank on a GPU under `config`, whose mesh has these `axes`. Pure.

    `of_model`: groups that follow from the model (`Planner.groups_of_model`); `base`: measured, of context and workspaces.
    """
    groups = num_groups(axes) + groups_after_mesh(config, axes) + of_model
    rest = groups * COMMUNICATOR + num_channels(config) * CHANNEL
    return (CONTEXT + WORKSPACES if base is None else base) + rest


def num_channels(config: DistConfig) -> int:
    """Of a rank in the middle of a pipeline: in and out, forward and backward. Pure."""
    pipeline = config.pipeline
    if pipeline.stages == 1:
        return 0
    # With several stages per rank the last rank sends to the first, too.
    return 2 * min(2, pipeline.stages - 1 if pipeline.virtual_stages == 1 else pipeline.stages)


def groups_after_mesh(config: DistConfig, axes: Axes) -> int:
    """Groups of a rank that `config` asks for besides those of the mesh (`groups.num_groups`). Pure."""
    shard, alone = axes.size("shard"), axes.size("dp_replicate") > 1 and config.local_sgd.enabled
    neighbours = placements_for(config).second  # with a second copy of the weights
    count = int(1 < neighbours < shard)
    if alone:  # what `ParallelMesh.one_replica` makes
        count += axes.size("cp") > 1 and axes.size("dp_shard") > 1
        count += axes.size("dp_replicate") * shard != axes.size("world")
    return count


def measured(device: torch.device) -> int | None:
    """Bytes in use there that are not in torch's allocator, other programs' included; None where it is no GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def measured_base() -> int | None:
    """Bytes of a context and of a matrix product's workspaces on the first GPU, which this process then has.

    None without a GPU, or where nobody says how much of it was in use before.
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
    """Of the first visible GPU, by all programs, as the driver's tool says without a context."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", first]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(said) << 20 if said.isdigit() else None
