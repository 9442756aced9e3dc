"""Adds values to training log records before TensorBoard, W&B or the console read them."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.engine.engine import Engine


class LogCallback(TrainerCallback):
    """Base of callbacks that add the result of `values()` to every training log record.

    HF logs on every rank, so `values()` may communicate. Evaluation logs, the summary at the end and the program's own log
    records pass unchanged.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks

    @property
    def engine(self) -> Engine | None:
        """The engine of the trained model; None before `train()` and in a trainer without a config."""
        trainer = self._trainer()
        return None if trainer is None else trainer.dist_engine

    def values(self) -> dict[str, float | int]:
        """Values to add to the record of the window that ends now. Every rank calls it."""
        raise NotImplementedError

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Move ahead of the reporters: HF calls callbacks in list order."""
        trainer = self._trainer()
        if trainer is not None:
            go_first(trainer.callback_handler.callbacks, self)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Add `values()` to the dict that the reporters get, and to the history, which HF has already written."""
        logs: Any = kwargs.get("logs")
        if self.engine is None or not _is_training_log(logs):
            return
        values = self.values()
        logs.update(values)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(values)


def _is_training_log(logs: object) -> bool:
    # Both keys, because a program may log its own "loss", perhaps on one rank only, where a collective would hang.
    return isinstance(logs, dict) and "loss" in logs and "learning_rate" in logs


def go_first(callbacks: list[TrainerCallback], callback: TrainerCallback) -> None:
    """Move `callback` behind the other LogCallbacks at the head of the list, before all other callbacks.

    Safe while HF iterates over the list: only entries up to the current position move.
    """
    head = next((i for i, other in enumerate(callbacks) if not isinstance(other, LogCallback)), len(callbacks))
    if head < callbacks.index(callback):
        callbacks.remove(callback)
        callbacks.insert(head, callback)
