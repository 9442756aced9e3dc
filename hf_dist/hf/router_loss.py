"""The auxiliary loss of a mixture's routers in the Trainer and in TRL: `experts/router_loss.py` has what it is."""

from __future__ import annotations

import sys
from typing import Any

from hf_dist.engine import Engine

__all__ = ["cover_trl", "tell_router_loss"]


def tell_router_loss(trainer: Any, steps: int) -> None:
    """HF multiplies a loss that counts items by the ranks, and does not divide it by the `steps` of the window. Local."""
    engine: Engine | None = trainer.dist_engine
    if engine is not None and engine.router_loss is not None:
        averages = trainer.args.average_tokens_across_devices
        engine.router_loss.parts = steps * (trainer.accelerator.num_processes if averages else 1)


def cover_trl(engine: Engine) -> None:
    """TRL's own forwards take the loss of every family from Mixtral's module. Local."""
    if engine.router_loss is not None and "trl" in sys.modules:
        from transformers.models.mixtral import modeling_mixtral

        engine.router_loss.take_over(modeling_mixtral)
