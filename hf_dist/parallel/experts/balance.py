"""How evenly tokens are spread over experts and over their ranks. Imbalance costs time and memory: a rank may get up to
as many times its share as there are ranks."""

from __future__ import annotations

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.parallel.experts.spread import exchanges

__all__ = ["loads", "most_over_mean"]


def loads(model: nn.Module, mesh: ParallelMesh) -> torch.Tensor | None:
    """(layers, experts): rows of every expert since the last call, over all ranks, fp32; None if nothing was routed.

    Collective over dp and tp, one all-reduce each. Recomputed forwards count once.
    """
    axis = mesh.views["ep"]
    spread = list(exchanges(model).values())
    if not spread:
        return None
    most = max(exchange.num_local for exchange in spread)
    counts = torch.zeros(len(spread), axis.size, most, device=mesh.device)
    for layer, exchange in enumerate(spread):
        own = exchange.take_load()
        if own is not None:
            counts[layer, axis.rank, : exchange.num_local] = own.float()
    for among in (mesh.dp, mesh.tp):  # each rank of tp has a part of the rows
        collectives.all_reduce(among, counts.view(-1), "sum").wait()
    counts = counts.flatten(1)
    return counts if bool(counts.any()) else None


def most_over_mean(counts: torch.Tensor, ranks: int) -> tuple[float, float]:
    """(for experts, for ranks): the most rows over the mean, in the worst layer. 1 is even."""

    def worst(parts: torch.Tensor) -> float:
        busy = parts[parts.sum(1) > 0]
        return float((busy.amax(1) / busy.mean(1)).max())

    return worst(counts), worst(counts.view(len(counts), ranks, -1).sum(2))
