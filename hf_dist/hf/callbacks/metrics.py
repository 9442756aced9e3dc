"""The numbers of a run for Prometheus, on rank 0 (`hf_dist.metrics_port`)."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.dist import watchdog
from hf_dist.dist.metrics_server import Metric, MetricsServer, Values, exposition
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.engine.engine import Engine
from hf_dist.errors import ConfigError, Problem
from hf_dist.planning.device_peak import peak_flops
from hf_dist.version import __version__

__all__ = ["MetricsCallback"]

_HALF = (torch.bfloat16, torch.float16)
# Key of a log record -> (name, help, factor to the base unit).
_LOGGED = {
    "loss": ("loss", "Training loss of the last log window", 1.0),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping, at the last log", 1.0),
    "learning_rate": ("learning_rate", "Learning rate at the last log", 1.0),
    "epoch": ("epoch", "Epochs done at the last log", 1.0),
    "tokens_per_second_per_rank": (
        "tokens_per_second_per_rank",
        "Real tokens a second and rank in the last log window",
        1.0,
    ),
    "samples_per_second": ("samples_per_second", "Samples a second of the job in the last log window", 1.0),
    "model_tflops_per_rank": (
        "model_flops_per_second_per_rank",
        "Useful floating-point operations a second and rank",
        1e12,
    ),
}
_SHARES = "time_", "_percent"


class MetricsCallback(TrainerCallback):
    """Serves `/metrics` and `/health` from the first step to the end of training.

    Reads what the Trainer logs and what the host has counted: no collective, and no question to the device.
    """

    _running: MetricsServer | None = None
    """Of this process: a training that ended in an exception has left it open."""

    def __init__(self, trainer: Any, port: int | str) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks
        self._port = port
        self._logs: dict[str, float] = {}
        self._step, self._skipped = 0, 0
        self._stepped = time.monotonic()
        self._saved: float | None = None
        self._layout = ""
        self._peak: float | None = None

    @property
    def _engine(self) -> Engine | None:
        trainer = self._trainer()
        return None if trainer is None else trainer.dist_engine

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Rank 0 opens the port; every rank gets an error if it cannot. Collective, once."""
        engine = self._engine
        if engine is None:
            return
        self._logs, self._saved = {}, None
        self._step, self._skipped = state.global_step, engine.skipped_steps
        self._stepped = time.monotonic()
        self._layout, self._peak = engine.mesh.describe(), _peak(engine)
        problem = self._open() if engine.mesh.world.rank == 0 else None
        agree(engine.mesh.world, problem, ConfigError)

    def _open(self) -> Problem | None:
        self._close()
        try:
            MetricsCallback._running = MetricsServer(self._port, self.text, watchdog.verdict)
        except OSError as error:
            fix = 'Take another port, or end the program that has it. "0.0.0.0:PORT" listens at every address of the machine.'
            return Problem(
                "hf_dist.metrics_port", repr(self._port), f"cannot be listened at: {error.strerror or error}", fix
            )
        return None

    @staticmethod
    def _close() -> None:
        running, MetricsCallback._running = MetricsCallback._running, None
        if running is not None:
            running.close()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Two numbers of the host."""
        self._step, self._stepped = state.global_step, time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """With `checkpoint.async_save`, the file system may still be writing."""
        self._saved = time.monotonic()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the numbers of a record. HF has read the loss, so the count of skipped steps is on the host, too."""
        logs: Mapping[str, object] = kwargs.get("logs") or {}
        self._logs |= {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        engine = self._engine
        if engine is not None and MetricsCallback._running is not None:
            self._skipped = engine.skipped_steps

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Close the port."""
        self._close()

    def text(self) -> str:
        """The page. Called by the server's threads."""
        return exposition({f"hf_dist_{name}": metric for name, metric in self._metrics(time.monotonic()).items()})

    def _metrics(self, now: float) -> dict[str, Metric]:
        logs = self._logs.copy()
        saved: Values = [] if self._saved is None else [({}, now - self._saved)]
        found: dict[str, Metric] = {
            "info": ("Version and layout", "gauge", [({"version": __version__, "layout": self._layout}, 1.0)]),
            "step": ("Optimizer steps done", "gauge", [({}, float(self._step))]),
            "seconds_since_step": ("Seconds since the last optimizer step ended", "gauge", [({}, now - self._stepped)]),
            "checkpoint_age_seconds": ("Seconds since the last checkpoint of this process", "gauge", saved),
            "skipped_steps_total": ("Steps skipped because of the gradient", "counter", [({}, float(self._skipped))]),
        }
        for key, (name, help, factor) in _LOGGED.items():
            found[name] = (help, "gauge", [({}, logs[key] * factor)] if key in logs else [])
        speed = logs.get("model_tflops_per_rank", math.nan) * 1e12
        share: Values = [({}, 100 * speed / self._peak)] if self._peak is not None and speed == speed else []
        found["device_peak_percent"] = (
            "Useful operations in percent of the device's peak in half precision",
            "gauge",
            share,
        )
        if "memory_peak_gb" in logs:
            largest = [({"rank": f"{logs['memory_peak_rank']:.0f}"}, logs["memory_peak_gb"] * 1e9)]
            found["memory_peak_bytes"] = (
                "Largest peak of all ranks in the last log window, and its rank",
                "gauge",
                largest,
            )
        begin, end = _SHARES
        shares = [
            ({"phase": key[len(begin) : -len(end)]}, value)
            for key, value in logs.items()
            if key.startswith(begin) and key.endswith(end)
        ]
        found["time_percent"] = ("Percent of the last log window by phase, on rank 0", "gauge", shares)
        return found


def _peak(engine: Engine) -> float | None:
    """Of this rank's device, in half precision also beside float8; None where the dtype or the device has none in the table."""
    if engine.device.type != "cuda" or engine.sharded.precision.compute not in _HALF:
        return None
    return peak_flops(torch.cuda.get_device_name(engine.device))
