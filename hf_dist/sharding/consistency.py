"""Are all ranks about to train the same model? Asked once, before the first collective that would hang or mix weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from hf_dist import collectives
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.mesh import ParallelMesh


def check_same_model(model: nn.Module, mesh: ParallelMesh) -> None:
    """Raise `ModelError` on every rank when names, shapes, dtypes or `requires_grad` differ. Collective over dp."""
    rows = [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = collectives.all_gather_object(mesh.dp, (digest, len(rows)))
    if len(set(digests)) == 1:
        return
    everyone = collectives.all_gather_object(mesh.dp, rows)
    other = next(r for r, d in enumerate(digests) if d != digests[0])
    mine, theirs = everyone[0], everyone[other]
    where = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))

    def row(rows: list[str]) -> str:
        return rows[where] if where < len(rows) else "nothing"

    raise ModelError(
        f"the model is not the same on every rank: rank 0 has {len(mine)} parameters, rank {other} has {len(theirs)}; the "
        f"first difference is {row(mine)} on rank 0 against {row(theirs)} on rank {other}. Build the model from the same "
        "configuration, and freeze the same parameters, on every rank."
    )


def synchronize_weights(model: nn.Module, mesh: ParallelMesh) -> None:
    """Give every rank the values of rank 0 where they differ (a new head, initialised at random). Collective over dp.

    A checksum per tensor decides, so nothing is sent when all ranks loaded the same checkpoint.
    """
    if mesh.dp.size == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    sums = collectives.all_gather_object(mesh.dp, [_checksum(t) for _, t in named])
    different = [k for k in range(len(named)) if any(theirs[k] != sums[0][k] for theirs in sums)]
    if not different:
        return
    warn_once(
        f"{len(different)} of {len(named)} tensors differ between ranks (first: {named[different[0]][0]}), as after a random "
        "initialisation with different seeds: the values of rank 0 are used everywhere"
    )
    for k in different:
        tensor = named[k][1].detach()
        on_device = tensor.to(mesh.device).contiguous()
        collectives.broadcast(mesh.dp, on_device)
        with torch.no_grad():
            tensor.copy_(on_device)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0
    raw = flat.view(torch.uint8)
    words = raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0 else raw
    return int(words.sum(dtype=torch.int64).item())
