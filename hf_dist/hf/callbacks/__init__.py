"""What a DistTrainer adds to the normal Trainer log: speed, a split of the time, memory, the start-up report."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_dist.hf.callbacks.adapters import AdaptersCallback
from hf_dist.hf.callbacks.communication import CommunicationCallback
from hf_dist.hf.callbacks.csv_files import CsvCallback
from hf_dist.hf.callbacks.disk_space import DiskSpaceCallback
from hf_dist.hf.callbacks.expert_load import ExpertLoadCallback
from hf_dist.hf.callbacks.finite import FiniteCallback
from hf_dist.hf.callbacks.flops_table import FlopsTableCallback
from hf_dist.hf.callbacks.layer_drop import LayerDropCallback
from hf_dist.hf.callbacks.log_record import LogCallback
from hf_dist.hf.callbacks.memory import MemoryCallback
from hf_dist.hf.callbacks.metrics import MetricsCallback
from hf_dist.hf.callbacks.start_up import StartUpCallback
from hf_dist.hf.callbacks.throughput import ThroughputCallback

__all__ = [
    "DiskSpaceCallback",
    "ExpertLoadCallback",
    "FiniteCallback",
    "LogCallback",
    "MemoryCallback",
    "StartUpCallback",
    "ThroughputCallback",
    "default_callbacks",
]


def default_callbacks(trainer: Any) -> list[TrainerCallback]:
    """The callbacks that every DistTrainer gets; they hold it weakly. `trainer.remove_callback(cls)` removes one."""
    found: list[TrainerCallback] = []
    if trainer.dist.hf_dist.log_measurements:
        # Memory first: its collective waits for the slowest rank, which after throughput's mark would count as data time.
        found += [MemoryCallback(trainer), ThroughputCallback(trainer)]
        if trainer.dist.expert_parallel.enabled:
            found.append(ExpertLoadCallback(trainer))
    found += [StartUpCallback(trainer), DiskSpaceCallback(trainer), AdaptersCallback(trainer)]
    found.append(FiniteCallback(trainer, trainer.dist.hf_dist.stop_if_not_finite))
    if trainer.dist.hf_dist.metrics_port is not None:
        found.append(MetricsCallback(trainer, trainer.dist.hf_dist.metrics_port))
    if trainer.dist.csv_monitor.enabled:
        found.append(CsvCallback(trainer.dist.csv_monitor))
    if trainer.dist.flops_profiler.enabled:
        found.append(FlopsTableCallback(trainer, trainer.dist.flops_profiler))
    if trainer.dist.progressive_layer_drop.enabled:
        found.append(LayerDropCallback(trainer, trainer.dist.progressive_layer_drop))
    if trainer.dist.comms_logger.enabled:
        found.append(CommunicationCallback())
    return found
