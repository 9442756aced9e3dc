"""What a DistTrainer reports into the normal Trainer log: speed, where the time goes, memory, the start-up report."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_dist.hf.callbacks.log_record import LogCallback
from hf_dist.hf.callbacks.memory import MemoryCallback
from hf_dist.hf.callbacks.start_up import StartUpCallback
from hf_dist.hf.callbacks.throughput import ThroughputCallback

__all__ = ["LogCallback", "MemoryCallback", "StartUpCallback", "ThroughputCallback", "default_callbacks"]


def default_callbacks(trainer: Any) -> list[TrainerCallback]:
    """The callbacks that every DistTrainer gets, holding it weakly. `trainer.remove_callback(cls)` takes one out."""
    # Memory first: its collective waits for the slowest rank, and after throughput's mark that would count as data.
    return [MemoryCallback(trainer), ThroughputCallback(trainer), StartUpCallback(trainer)]
