"""hf_dist through its own loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import hf_dist.hf  # noqa: F401  (how HF models are written: `hf_dist.initialize` imports it, so it counts)
from hf_dist.engine.build import initialize
from hf_dist.tools.bench.engines.loop import Engine, Loop
from hf_dist.tools.bench.meter import Meter
from hf_dist.tools.bench.work import Batch, Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    assert contender.config is not None
    engine = initialize(work.make_model(), config=contender.config)
    if engine.mesh.axes.size("pp") > 1:
        return _Pipelined(work, engine)

    def forward(batch: Batch, is_last: bool) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        engine.backward(loss)
        if not is_last:
            engine.step()  # counts the microbatch

    data = engine.mesh.data
    return Loop(work, data.rank, forward, backward, engine.step, data.size)


@dataclass
class _Pipelined:
    """Microbatches of a step pass the stages together, so forward and backward are one phase."""

    work: Work
    engine: Any

    def run(self, meter: Meter) -> None:
        """All steps of the work."""
        data = self.engine.mesh.data
        for window in self.work.windows(data.rank, data.size):
            meter.mark("data")
            loss = self.engine.train_batch(iter(window))
            meter.mark("pipeline")
            meter.end_step(loss)
