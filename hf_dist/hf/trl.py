"""What TRL's trainers do with models beside the one that is trained: measured, synchronised, or refused.

TRL hands reference and reward models to `accelerator.prepare_model(..., evaluation_mode=True)`, which shards them; the rest of
its places that look at the engine are quiet for ours. Source: trl 1.16, trainer/dpo_trainer.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.trl_callbacks import let_callbacks_work

_OVER_STAGES = {"SFTTrainer", "RewardTrainer"}
"""Trainers of TRL whose step is one forward and one backward of the trained model, as a pipeline needs it."""

_NUMBERS = ("_metrics", "_total_train_tokens")
"""What TRL's trainers count and average by themselves, until they log it."""


def _names(trainer: Any) -> list[str]:
    """Of the classes of TRL that a Trainer is made of."""
    return [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]


class TrlMixin:
    """Part of `DistTrainerMixin`; nothing here is called by a Trainer that is not TRL's."""

    accelerator: Any
    model: Any
    dist: Any
    callback_handler: Any
    control: Any
    _metrics: dict[str, Any]

    def create_accelerator_and_postprocess(self) -> None:
        """HF's, but not for trainers that do more than train one model when it is cut into stages."""
        trainer = next((name for name in _names(self) if name.endswith("Trainer")), None)
        if self.dist is not None and self.dist.pipeline.stages > 1 and trainer not in (None, *_OVER_STAGES):
            raise ConfigError(
                Problem(
                    "pipeline.stages",
                    str(self.dist.pipeline.stages),
                    f"cannot be combined with {trainer}: its step generates, or asks a reference model",
                    'Use {"zero_optimization": {"stage": 3}} instead, with pipeline.stages 1.',
                )
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """TRL's; with `precompute_ref_log_probs` it comes before training, with a model that nobody has prepared."""
        if isinstance(self.accelerator, DistAccelerator) and self.accelerator.engine_of(model) is None:
            self.accelerator.prepare_model(model, evaluation_mode=True)
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """HF's; callbacks of TRL that read or write weights get a way to do so on shards."""
        if isinstance(self.accelerator, DistAccelerator):
            let_callbacks_work(self.callback_handler.callbacks, self.accelerator)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """HF's, of numbers that all ranks have."""
        if self.control.should_log:
            self._tell_numbers()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """HF's, whose last record has the numbers that no other had."""
        self._tell_numbers()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """HF's, whose numbers are logged after it."""
        found = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        self._tell_numbers()
        return found

    def _tell_numbers(self) -> None:
        """What TRL has counted by itself since its last log, as the last stage has it: the logits are there. Collective.

        Not in `log`: TRL's own comes before it where its classes derive from ours (`hf_dist.run`).
        """
        engine = self.dist_engine  # type: ignore[attr-defined]
        if engine is not None and _names(self) and "_metrics" in vars(self):
            known = engine.runner.from_last({mode: dict(numbers) for mode, numbers in self._metrics.items()})
            for mode, numbers in known.items():
                self._metrics[mode].clear()
                self._metrics[mode].update(numbers)

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Inside, batches are examples: afterwards TRL's numbers are what they were."""
        kept = {name: copy.deepcopy(vars(self)[name]) for name in _NUMBERS if name in vars(self)}
        try:
            yield
        finally:
            vars(self).update(kept)
