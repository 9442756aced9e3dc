"""torch's DistributedDataParallel: fp32 weights, under autocast in bf16."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_dist.tools.bench.engines.loop import Engine, Loop, device_of, join
from hf_dist.tools.bench.work import Batch, Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    join(work)
    device = device_of(work)
    model = DistributedDataParallel(work.make_model().to(device), gradient_as_bucket_view=True)
    if work.reduce_dtype == "bf16":
        # A lambda: DDP compares annotations with its own types, and here annotations are strings.
        model.register_comm_hook(None, lambda state, bucket: _in_bf16(bucket))
    optimizer = work.make_optimizer(model)

    def forward(batch: Batch, is_last: bool) -> torch.Tensor:
        model.require_backward_grad_sync = is_last  # as `no_sync` does
        with torch.autocast(device.type, torch.bfloat16, enabled=work.bf16):
            loss: torch.Tensor = model(**batch).loss
        return loss

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        (loss / work.accumulation).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return Loop(work, rank, forward, backward, update)


def _in_bf16(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Like torch's `bf16_compress_hook`, which needs a GPU."""
    values = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work: Any = dist.all_reduce(values, async_op=True)
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: bucket.buffer().copy_(values))
    return done
