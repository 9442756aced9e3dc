"""A run whose weights are no longer finite: told once, with the step and the first parameter; ended if the config says so."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.checkpoint.finite import trained_not_finite
from hf_dist.dist import collectives
from hf_dist.errors import ModelError
from hf_dist.log import say


class FiniteCallback(TrainerCallback):
    """Looks every `logging_steps`, every `save_steps` and at the end of an epoch.

    It reads the weights only if a gradient was not finite.
    """

    def __init__(self, trainer: Any, stops: bool) -> None:
        """`stops`: raise `ModelError` on every rank (`hf_dist.stop_if_not_finite`)."""
        self._trainer = weakref.ref(trainer)
        self._stops = stops
        self._is_told = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Another `train()` tells it again, of steps of its own."""
        self._is_told = False
        trainer = self._trainer()
        if trainer is not None and trainer.dist_engine is not None:
            trainer.dist_engine.not_finite.forget()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Due by the step alone: what `control` asks for may be one rank's wish until all have agreed."""
        periods = [int(steps) for steps in (state.logging_steps, state.save_steps) if steps and steps >= 1]
        if state.global_step >= state.max_steps or any(state.global_step % steps == 0 for steps in periods):
            self._look()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Before the log record and the checkpoint of an epoch."""
        self._look()

    def _look(self) -> None:
        """Collective where a gradient was not finite, which is equal on all ranks; local if replicas train alone."""
        trainer = self._trainer()
        engine = None if trainer is None else trainer.dist_engine
        if engine is None or self._is_told:
            return
        step = engine.not_finite.step
        if not step:
            return
        first = trained_not_finite(engine.sharded)
        everyone = (
            [first] if engine.replicas_here is not None else collectives.all_gather_object(engine.mesh.world, first)
        )
        name = next(filter(None, everyone), None)
        if name is None:
            engine.not_finite.forget()
            return
        self._is_told = True
        text = f"weights are not finite since step {step}, first {name}: the gradient of that step was not"
        if self._stops:
            raise ModelError(
                f"{text}. hf_dist.stop_if_not_finite ends the run; resume from a checkpoint before that step."
            )
        say(
            f"{text}. The newest checkpoint with finite weights is kept, whatever save_total_limit is; "
            '"hf_dist": {"stop_if_not_finite": true} ends such a run.'
        )
