"""hf_dist through its own loop."""

from __future__ import annotations

import torch

import hf_dist.hf  # noqa: F401  (how HF models are written: `hf_dist.initialize` imports it, so it counts)
from hf_dist.bench.engines.loop import Engine, Loop
from hf_dist.bench.work import Batch, Contender, Work
from hf_dist.build import initialize

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    assert contender.config is not None
    engine = initialize(work.make_model(), config=contender.config)

    def forward(batch: Batch, is_last: bool) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        engine.backward(loss)
        if not is_last:
            engine.step()  # counts the microbatch

    return Loop(work, rank, forward, backward, engine.step)
