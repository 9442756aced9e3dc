"""Ranks that compute one model together must read the same rows and draw the same random numbers. A rank that does not is
named in an error before it hangs the others."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.axes import PATHS
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ModelError
from hf_dist.tensors.checksum import batch_digest
from hf_dist.tensors.random_streams import drops, stream_digest

__all__ = ["compare_rows"]

_AXES = ("tp", "cp")
"""Axes along which rows are compared here; along `pp`, `engine/pipeline_runner.py` does it."""
_DIFFERENCES = (
    (
        "reads another batch",
        "the same rows in the same order. Use one seed for all of them, and let the loader count data ranks, not processes.",
    ),
    ("draws other random numbers", "to drop the same elements. Seed them alike before the first forward."),
)
_ROW = struct.Struct("<dd")
"""Digests of the batch and of the random streams."""
_CHECKED = 8
_CHECK_EVERY = 64
"""On a GPU, batches are compared in the first `_CHECKED` forwards and every 64th: the host waits for each comparison."""


def compare_rows(model: nn.Module, mesh: ParallelMesh, rests: Callable[[], bool] = lambda: False) -> None:
    """Install a hook that compares the ranks' arguments of `model` in training. Local; the hook is collective over tp and cp.

    Call it before sequences are split, so that the hook sees whole rows. `rests`: True while a rank may run the model alone.
    """
    axes = [axis for axis in _AXES if mesh.axes.size(axis) > 1]
    if not axes:
        return
    calls, draws = 0, drops(model)

    def compare(module: nn.Module, args: object, kwargs: object) -> None:
        nonlocal calls
        if not module.training or rests() or torch.compiler.is_compiling():
            return
        calls += 1
        if mesh.device.type != "cpu" and calls > _CHECKED and calls % _CHECK_EVERY:
            return
        digests = batch_digest((args, kwargs)).item(), batch_digest(stream_digest() if draws else []).item()
        for axis in axes:
            _compare_along(axis, digests, mesh)

    model.register_forward_pre_hook(compare, with_kwargs=True)


def _compare_along(axis: str, digests: tuple[float, float], mesh: ParallelMesh) -> None:
    everyone = [_ROW.unpack(row) for row in collectives.gather_rows(mesh.views[axis], _ROW.pack(*digests))]
    if len(set(everyone)) == 1:
        return
    which = 0 if len({rows for rows, _ in everyone}) > 1 else 1
    other = next(rank for rank, theirs in enumerate(everyone) if theirs[which] != everyone[0][which])
    line = mesh.axes.line(axis, mesh.world.rank)
    does, need = _DIFFERENCES[which]
    raise ModelError(
        f"rank {line[other]} {does} than rank {line[0]}, although they compute one model together ({PATHS[axis]} {len(line)}): "
        f"ranks {line[0]} to {line[-1]} need {need}"
    )
