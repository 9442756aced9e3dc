"""Lets callbacks of users and libraries save adapters from the main rank alone in `on_save`."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.hf.callbacks.log_record import go_first
from hf_dist.hf.saving import keep_adapters


class AdaptersCallback(TrainerCallback):
    """During `on_save` the main rank holds the trained weights of a model with adapters.

    Callbacks for PEFT, and LLaMA-Factory's for value heads, run `if args.should_save: model.save_pretrained(...)`. Adapters are
    small enough to keep. For a model without adapters nothing is kept, and such a call raises an error on every rank.
    Source: transformers `trainer_callback.py`, `CallbackHandler.call_event`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Move ahead of every callback that may save."""
        trainer = self._trainer()
        if trainer is not None:
            go_first(trainer.callback_handler.callbacks, self)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Runs on every rank, after the folder of the checkpoint was begun."""
        trainer = self._trainer()
        if trainer is None or trainer.dist_engine is None:
            return
        if any(_may_save(callback) for callback in trainer.callback_handler.callbacks):
            keep_adapters(trainer.dist_engine)


def _may_save(callback: TrainerCallback) -> bool:
    """Whether the class of another library or the user handles `on_save`."""
    cls = type(callback)
    known = cls.__module__.split(".")[0] in ("transformers", "hf_dist")
    return not known and getattr(cls, "on_save", None) is not TrainerCallback.on_save
