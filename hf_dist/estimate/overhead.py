"""What a rank takes of its GPU beside tensors: CUDA's context, workspaces and kernels of cuBLAS, NCCL's communicators.

No tensor's bytes, so neither a planned peak nor torch's allocator has them. The figures are estimates until they are measured:
a context by `measured_base` on a machine with a GPU, all of it by `measured` in a running rank.
"""

from __future__ import annotations

import os
import subprocess

import torch

from hf_dist.config import DistConfig, axes_of
from hf_dist.groups import num_groups

__all__ = ["CHANNEL", "COMMUNICATOR", "CONTEXT", "WORKSPACES", "estimated", "measured", "measured_base"]

CONTEXT = 500_000_000
"""Of one process: what NVIDIA's data-centre cards are said to need."""
WORKSPACES = 200_000_000
"""cuBLAS's, and kernels that are loaded at their first use."""
COMMUNICATOR = 200_000_000
"""Of one group; 0.1 to 0.4 GB, by the number of its channels."""
CHANNEL = 50_000_000
"""Of one direction between two stages, whose communicator is made small (`groups.py`)."""


def estimated(config: DistConfig, world_size: int, base: int | None = None) -> int:
    """Bytes of a rank on a GPU under `config`. `base`: what was measured of a context and workspaces. Pure."""
    pipeline = config.pipeline
    # Of a rank in the middle: in and out, forward and backward; with several stages per rank the ends are joined, too.
    neighbours = min(2, pipeline.stages - 1) if pipeline.virtual_stages == 1 else min(2, pipeline.stages)
    channels = 2 * neighbours if pipeline.stages > 1 else 0
    axes = axes_of(config, world_size)
    groups = num_groups(axes)
    groups += 2 if axes.size("cp") > 1 else 0  # sequences in two ways (`sequence/`)
    groups += 1 < config.zero_optimization.zero_hpz_partition_size < axes.size("shard")  # neighbours with a second copy
    return (CONTEXT + WORKSPACES if base is None else base) + groups * COMMUNICATOR + channels * CHANNEL


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
