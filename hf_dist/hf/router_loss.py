"""The auxiliary router loss of a mixture of experts in the Trainer and in TRL. Defined in `experts/router_loss.py`."""

from __future__ import annotations

import sys
from typing import Any

from hf_dist.engine import Engine

__all__ = ["cover_trl", "tell_router_loss"]


def tell_router_loss(trainer: Any, steps: int) -> None:
    """Undo HF's scaling of a loss that counts items: times the ranks, not divided by the window's `steps`. Local."""
    engine: Engine | None = trainer.dist_engine
    if engine is not None and engine.router_loss is not None:
        averages = trainer.args.average_tokens_across_devices
        engine.router_loss.parts = steps * (trainer.accelerator.num_processes if averages else 1)


def cover_trl(engine: Engine) -> None:
    """Cover TRL's own forwards, which use Mixtral's function for the auxiliary loss of every family. Local."""
    if engine.router_loss is not None and "trl" in sys.modules:
        from transformers.models.mixtral import modeling_mixtral

        engine.router_loss.take_over(modeling_mixtral)
