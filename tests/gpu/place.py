"""Where the tests of this folder run: on the GPUs of this machine, or as a rehearsal on its CPU.

A rehearsal runs the same functions, over gloo, with fewer cases and smaller sizes: it says that they run, and where numbers
mean the same on a CPU also that these are right. What a CPU does not have (streams, memory of a GPU, NCCL) is left to a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import pytest
import torch

__all__ = ["DEVICE", "GPUS", "TOLERANCE", "join", "needs", "rehearsed", "worlds"]

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = torch.device("cuda", 0) if GPUS else torch.device("cpu")
TOLERANCE = 1e-4 if GPUS else 1e-5
"""Relative, against one process on the CPU: a GPU makes its sums in another order (and no TF32, which is off by default)."""
REHEARSAL_RANKS = 2
Case = TypeVar("Case")


def needs(count: int) -> pytest.MarkDecorator:
    """Skip the test where there are fewer GPUs."""
    return pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPU{'s' if count > 1 else ''}, there are {GPUS}")


def rehearsed(cases: Sequence[Case], count: int = 1) -> list[Case]:
    """All of them on a GPU, without one the first few."""
    return list(cases if GPUS else cases[:count])


def worlds(sizes: Sequence[int]) -> list[object]:
    """Numbers of ranks for `parametrize`: with a GPU each under NCCL; without one only those of a rehearsal."""
    if not GPUS:
        return [size for size in sizes if size == REHEARSAL_RANKS]
    return [pytest.param(size, marks=needs(size)) for size in sizes]


def join(rank: int, world: int, *, shared: bool = False, seconds: int = 120) -> str:
    """Begin torch.distributed in a rank of `tests.harness` and take a device, whose name is returned. Collective.

    `shared`: all on the first GPU, over gloo by way of the host.
    """
    import torch.distributed as dist

    os.environ.pop("ACCELERATE_USE_CPU", None)
    device = torch.device("cpu") if not GPUS else torch.device("cuda", 0 if shared else rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    over_gloo = device.type == "cpu" or (shared and world > 1)
    dist.init_process_group("gloo" if over_gloo else "nccl", timeout=timedelta(seconds=seconds))
    return str(device)
