"""Ranks that compute one model together must read the same rows: one that does not is named, before it hangs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist import collectives
from hf_dist.axes import PATHS
from hf_dist.checksum import batch_digest
from hf_dist.errors import ModelError
from hf_dist.mesh import ParallelMesh

__all__ = ["compare_rows"]

_AXES = ("tp", "cp")
"""Along a pipeline the schedule compares them (`pipelined.py`)."""
_CHECKED = 8
_CHECK_EVERY = 64
"""Batches are compared in the first forwards, and then now and then: on a GPU the host waits for it."""


def compare_rows(model: nn.Module, mesh: ParallelMesh, rests: Callable[[], bool] = lambda: False) -> None:
    """Compare the arguments of `model` in training, by a hook that sees them whole. Local; the hook is collective.

    `rests`: whether a rank may run the model alone for the moment.
    """
    axes = [axis for axis in _AXES if mesh.axes.size(axis) > 1]
    if not axes:
        return
    calls = 0

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        if not module.training or rests() or torch.compiler.is_compiling():
            return
        calls += 1
        if calls > _CHECKED and calls % _CHECK_EVERY:
            return
        digest = batch_digest((args, kwargs)).reshape(1).to(mesh.device)
        for axis in axes:
            _compare_along(axis, digest, mesh)

    model.register_forward_pre_hook(compare, with_kwargs=True)


def _compare_along(axis: str, digest: torch.Tensor, mesh: ParallelMesh) -> None:
    both = torch.cat([digest, -digest])
    collectives.all_reduce(mesh.views[axis], both, op="max").wait()
    if float(both[0]) == -float(both[1]):
        return
    everyone = collectives.all_gather_object(mesh.views[axis], float(digest))
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    line = mesh.axes.line(axis, mesh.world.rank)
    raise ModelError(
        f"rank {line[other]} reads another batch than rank {line[0]}, with which it computes one model ({PATHS[axis]} "
        f"{len(line)}): ranks {line[0]} to {line[-1]} need the same rows in the same order. Use the same seed on all of them, "
        "and let the loader count data ranks, not processes."
    )
