"""torch's FSDP2: `fully_shard` on every block and on the rest; fp32 shards, gathered in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_dist.tools.bench.engines.loop import Engine, Loop, blocks_of, device_of, join, reduce_dtype
from hf_dist.tools.bench.work import Batch, Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    join(work)
    options: dict[str, Any] = {"mesh": init_device_mesh(work.device, (work.ranks,))}
    if work.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype(work))
    model = work.make_model().to(device_of(work))
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = work.make_optimizer(model)

    def forward(batch: Batch, is_last: bool) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        (loss / work.accumulation).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return Loop(work, rank, forward, backward, update)
