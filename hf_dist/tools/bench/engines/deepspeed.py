"""DeepSpeed with the same JSON, through its own loop."""

from __future__ import annotations

import deepspeed
import torch

from hf_dist.tools.bench.engines.loop import Engine, Loop
from hf_dist.tools.bench.work import Batch, Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    config: dict[str, object] = dict(contender.config or {})
    # The same optimizer for all; DeepSpeed would compile its own at the first start.
    config.pop("optimizer")
    config["zero_force_ds_cpu_optimizer"] = False
    deepspeed.init_distributed(dist_backend="nccl" if work.device == "cuda" else "gloo", verbose=False)
    model = work.make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=work.make_optimizer(model), config=config)

    def forward(batch: Batch, is_last: bool) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        engine.backward(loss)
        if not is_last:
            engine.step()  # counts the microbatch

    return Loop(work, rank, forward, backward, engine.step)
