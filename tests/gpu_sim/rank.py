"""One rank of a job on a simulated GPU, from the outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.gpu_sim.meeting import Meeting
from tests.gpu_sim.nccl import Communicators, as_nccl, on_host
from tests.gpu_sim.recorder import Recorder, follows_resizes
from tests.gpu_sim.streams import as_gpu

GPU = "cuda:0"
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU")


@contextmanager
def simulated_gpu(rank: int = 0) -> Iterator[Recorder]:
    """Inside, this process has a GPU and no launcher; whoever makes tensors does so `with recorder`."""
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    recorder = Recorder(rank)
    swaps = mock.patch.object(torch.utils, "swap_tensors", _swap)
    # Sums over gigabytes that nobody has: nine tenths of what a simulated start costs.
    alike = mock.patch("hf_dist.sharding.consistency.checksum", lambda tensor: 0)
    fused = mock.patch("hf_dist.tensors.one_kernel.compiled", recorder.compiled)
    with as_gpu(recorder), follows_resizes(recorder), on_host(recorder), swaps, alike, fused:
        yield recorder


def _swap(one: torch.Tensor, other: torch.Tensor, swap: Any = torch.utils.swap_tensors) -> None:
    """What `module.to` does with tensors without elements; torch refuses where it changes nothing as well."""
    if (one.device, one.dtype) != (other.device, other.dtype):
        swap(one, other)


@contextmanager
def simulated_rank(
    world: int = 1, rank: int = 0, *, meet: str | None = None, represented: Callable[[int], int] | None = None
) -> Iterator[tuple[Recorder, Communicators]]:
    """Inside, this process is `rank` of `world` GPUs.

    `meet`: a folder through which simulated ranks in other processes give each other objects; `represented`: which of them
    answers for a rank (default: this one for all).
    """
    store = Meeting(meet) if meet else None
    with (
        simulated_gpu(rank) as recorder,
        as_nccl(recorder, world, rank, store, represented or (lambda _: rank)) as model,
    ):
        yield recorder, model
