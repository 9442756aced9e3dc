"""Values added to the records of the training log, before TensorBoard, W&B or the console read them."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback

from hf_dist.engine import Engine


class LogCallback(TrainerCallback):
    """Base of callbacks that add values to every training log record; `values()` makes them.

    HF logs on every rank, so `values()` may communicate. Logs of evaluation, the summary at the end and what a program
    logs by itself pass unchanged.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks

    @property
    def engine(self) -> Engine | None:
        """The engine of the model that is trained; None before `train()` and in a trainer without a config."""
        trainer = self._trainer()
        return None if trainer is None else trainer.dist_engine

    def values(self) -> dict[str, float | int]:
        """What to add to the record of the window that ends now. Every rank calls it."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a place before the reporters: callbacks are called in the order of the list."""
        trainer = self._trainer()
        if trainer is not None:
            go_first(trainer.callback_handler.callbacks, self)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add `values()` to the dict that the reporters get and to the history, which HF has written before."""
        logs: Any = kwargs.get("logs")
        if self.engine is None or not _is_training_log(logs):
            return
        values = self.values()
        logs.update(values)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(values)


def _is_training_log(logs: Any) -> bool:
    # Both, because a program may log a "loss" of its own, maybe on one rank only, where a collective would hang.
    return isinstance(logs, dict) and "loss" in logs and "learning_rate" in logs


def go_first(callbacks: list[TrainerCallback], callback: TrainerCallback) -> None:
    """Move `callback` behind the other LogCallbacks at the head of the list, before everything else.

    Safe while HF iterates over the list: only what is at or before the current place moves.
    """
    head = next((i for i, other in enumerate(callbacks) if not isinstance(other, LogCallback)), len(callbacks))
    if head < callbacks.index(callback):
        callbacks.remove(callback)
        callbacks.insert(head, callback)
