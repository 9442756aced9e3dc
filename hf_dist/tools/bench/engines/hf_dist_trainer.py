"""hf_dist through `DistTrainer`."""

from __future__ import annotations

from typing import Any

from hf_dist.hf.args import DistTrainingArguments
from hf_dist.hf.trainer import DistTrainer
from hf_dist.tools.bench.engines.loop import Engine
from hf_dist.tools.bench.engines.trainer import TrainerRun, arguments
from hf_dist.tools.bench.work import Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    config = contender.config or {}
    given: dict[str, Any] = {**arguments(work, config["gradient_accumulation_steps"]), "dist_config": config}
    return TrainerRun(work, DistTrainer, DistTrainingArguments(**given))
