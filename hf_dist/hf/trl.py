"""Models that TRL's trainers use beside the trained one: measured, synchronised, or refused.

TRL passes reference and reward models to `accelerator.prepare_model(..., evaluation_mode=True)`, which shards them. TRL's
other checks for DeepSpeed and FSDP find neither here. Source: trl 1.16, trainer/dpo_trainer.py.
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
"""TRL's trainers whose step is one forward and one backward of the trained model, as a pipeline requires."""

_NUMBERS = ("_metrics", "_total_train_tokens")
"""Attributes in which TRL's trainers count and average until they log."""


def _names(trainer: object) -> list[str]:
    """Names of the TRL classes among a Trainer's bases."""
    return [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]


class TrlMixin:
    """Part of `DistTrainerMixin`. Does nothing in a Trainer that is not TRL's."""

    accelerator: object
    model: object
    dist: Any
    callback_handler: Any
    control: Any
    _metrics: dict[str, Any]

    def create_accelerator_and_postprocess(self) -> None:
        """HF's, but under a pipeline it refuses trainers that do more than train one model."""
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

    def compute_ref_log_probs(self, model: nn.Module, inputs: object) -> object:
        """TRL's. With `precompute_ref_log_probs` it runs before training, on a model that is not prepared yet."""
        if isinstance(self.accelerator, DistAccelerator) and self.accelerator.engine_of(model) is None:
            self.accelerator.prepare_model(model, evaluation_mode=True)
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def _let_callbacks_work(self) -> None:
        """Before a training: those of TRL's that read or write weights do so on shards."""
        if isinstance(self.accelerator, DistAccelerator):
            let_callbacks_work(self.callback_handler.callbacks, self.accelerator)

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        """HF's, after sharing TRL's numbers with all ranks."""
        if self.control.should_log:
            self._tell_numbers()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def _finalize_training(self, *args: object, **kwargs: object) -> object:
        """HF's, after sharing the numbers that go into the last record only."""
        self._tell_numbers()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: object, **kwargs: object) -> object:
        """HF's; its numbers are logged afterwards."""
        found = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        self._tell_numbers()
        return found

    def _tell_numbers(self) -> None:
        """Share what TRL counted since its last log, from the last stage, which has the logits. Collective.

        Not done in `log`, because TRL's own runs before it if TRL's classes derive from hf_dist's (`hf_dist.run`).
        """
        engine = self.dist_engine  # type: ignore[attr-defined]
        if engine is not None and _names(self) and "_metrics" in vars(self):
            known = engine.runner.from_last({mode: dict(numbers) for mode, numbers in self._metrics.items()})
            for mode, numbers in known.items():
                self._metrics[mode].clear()
                self._metrics[mode].update(numbers)

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Inside, batches are examples only: at exit TRL's numbers are restored."""
        kept = {name: copy.deepcopy(vars(self)[name]) for name in _NUMBERS if name in vars(self)}
        try:
            yield
        finally:
            vars(self).update(kept)
