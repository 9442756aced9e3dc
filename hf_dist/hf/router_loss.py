"""The auxiliary router loss of a mixture of experts in the Trainer and in TRL. Defined in `parallel/experts/router_loss.py`."""

from __future__ import annotations

import sys
from typing import Any

from hf_dist.engine.engine import Engine

__all__ = ["cover_trl", "parts_of_window", "tell_router_loss"]


def tell_router_loss(trainer: Any, steps: int) -> None:
    """Undo HF's scaling of a loss that counts items: times the ranks, not divided by the window's `steps`. Local."""
    engine: Engine | None = trainer.dist_engine
    if engine is not None and engine.router_loss is not None:
        engine.router_loss.parts = parts_of_window(trainer, steps)


def parts_of_window(trainer: Any, steps: int) -> int:
    """Microbatches of all ranks whose losses HF adds up, where a loss counts the items of a window of `steps`. Local."""
    return steps * (trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1)


def cover_trl(engine: Engine) -> None:
    """Cover TRL's own forwards, which use Mixtral's function for the auxiliary loss of every family. Local."""
    if engine.router_loss is not None and "trl" in sys.modules:
        from transformers.models.mixtral import modeling_mixtral

        engine.router_loss.take_over(modeling_mixtral)
