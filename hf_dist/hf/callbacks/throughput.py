"""Training speed, and where the time of a step goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_dist.hf.callbacks.flops import TrainingFlops
from hf_dist.hf.callbacks.log_record import LogCallback
from hf_dist.hf.callbacks.phases import PAUSE, WAIT, PhaseClock, start_clock
from hf_dist.hf.callbacks.tokens import TokenCounter


class ThroughputCallback(LogCallback):
    """Adds speed and a split of the time to every training log, for the window since the last log.

    `tokens_per_second_per_rank`: real tokens without padding, divided over the ranks of a pipeline; `model_tflops_per_rank`:
    10**12 FLOP/s by the formula of `TrainingFlops` (both only for models with `input_ids`); `samples_per_second`: rows of
    this rank times the number of data ranks. The time for these speeds excludes evaluation and saving.

    Percent of the wall time, which includes evaluation and saving (in `time_other_percent`):
    `time_data_percent`: the loader, the transfer to the device, and the reporters after a log;
    `time_forward_backward_percent`: all microbatches and the gradient norm; `time_optimizer_percent`: the optimizer and the
    schedule; `time_communication_wait_percent`: blocked in waits for other ranks, not counted in the others (CPUs only, see
    `GpuClock`).
    """

    def __init__(self, trainer: object) -> None:
        super().__init__(trainer)
        self._clock: PhaseClock | None = None
        self._counter = TokenCounter(None)
        self._flops: TrainingFlops | None = None
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Watch the model's forwards until `on_train_end`."""
        super().on_train_begin(args, state, control, **kwargs)
        self._stop()  # an earlier training may have ended in an exception
        engine = self.engine
        if engine is None:
            return
        self._counter = TokenCounter(getattr(engine.model, "config", None))
        self._flops = TrainingFlops.of(engine.sharded.whole)
        self._hook = engine.model.register_forward_pre_hook(self._see, with_kwargs=True)
        self._clock = start_clock(engine.device)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Remove the hooks from the model."""
        self._stop()

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._clock = None

    def _see(self, module: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        # Hooks on the model, not the trainer: they see the batch as a collator or a TRL trainer changed it.
        if module.training and torch.is_grad_enabled():
            self._counter.add(kwargs)

    # --------------------------------------------------------------------- phases

    def _mark(self, phase: str) -> None:
        if self._clock is not None:
            self._clock.mark(phase)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends the pause between two epochs."""
        self._mark("other")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """The batches of the window have arrived."""
        self._mark("data")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """All microbatches have run and their gradient is clipped."""
        self._mark("forward_backward")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Optimizer and schedule have stepped."""
        self._mark("optimizer")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends the work after the last step."""
        self._mark("other")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends an evaluation."""
        self._mark(PAUSE)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Ends the write of a checkpoint."""
        self._mark(PAUSE)

    # --------------------------------------------------------------------- values

    def values(self) -> dict[str, float | int]:
        """Speed and time split of the window that ends now. Local."""
        engine = self.engine
        if self._clock is None or engine is None:
            return {}
        self._clock.mark("other")
        seconds = self._clock.read()
        self._clock.tell(engine.global_steps, seconds)
        # Every stage of a rank runs each microbatch, and the ranks of a pipeline share the work on it.
        runs = engine.config.pipeline.virtual_stages if engine.pipeline else 1
        samples, tokens, pairs = (count // runs for count in self._counter.read())
        ranks = engine.mesh.axes.size("batch")
        speed = self._speed(seconds, samples * engine.mesh.axes.size("data"), tokens // ranks, pairs // ranks)
        return {**speed, **_split(seconds)}

    def _speed(self, seconds: dict[str, float], samples: int, tokens: int, pairs: int) -> dict[str, float | int]:
        busy = sum(seconds.values()) - seconds.get(PAUSE, 0.0)
        if busy <= 0:
            return {}
        speed: dict[str, float | int] = {"samples_per_second": samples / busy} if samples else {}
        if tokens:
            speed["tokens_per_second_per_rank"] = tokens / busy
            if self._flops is not None:
                speed["model_tflops_per_rank"] = self._flops.total(tokens, pairs) / busy / 1e12
        return speed


def _split(seconds: dict[str, float]) -> dict[str, float | int]:
    total = sum(seconds.values())
    if total <= 0:
        return {}
    percent = {phase: 100 * spent / total for phase, spent in seconds.items()}
    shown = ["data", "forward_backward", "optimizer", *([WAIT] if WAIT in seconds else [])]
    split: dict[str, float | int] = {f"time_{phase}_percent": percent.get(phase, 0.0) for phase in shown}
    split["time_other_percent"] = percent.get("other", 0.0) + percent.get(PAUSE, 0.0)
    return split
