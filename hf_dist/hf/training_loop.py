"""The loop around an accelerator, as the accelerator and its engines see it: one of the user's own, or a Trainer's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import nn

from hf_dist.engine.window import Loop
from hf_dist.optim.loss_scale import DynamicLossScaler

__all__ = ["LoopOfTrainer", "MicrobatchCount", "TrainingLoop"]


class TrainingLoop:
    """A loop of the user's own: nothing is known of it."""

    own_model: nn.Module | None = None
    """The Trainer's model; None in a custom loop."""
    timeout: timedelta | None = None
    """For every process group; None: accelerate's, or the default."""

    @property
    def calls_model(self) -> Callable[[nn.Module, Mapping[str, object]], object] | None:
        """How training calls the model with a batch. None means `model(**batch)`."""
        return None

    def in_training(self) -> bool:
        """Whether the Trainer is inside `train()`; always True in a custom loop. Local."""
        return True

    def modules_beside(self) -> list[nn.Module]:
        """Modules that the Trainer trains beside its model, such as a loss with parameters. Local."""
        return []


class LoopOfTrainer(TrainingLoop):
    """A Trainer's loop. Weakly: a Trainer that is dropped takes its optimizer states with it, without the cyclic collector."""

    def __init__(self, trainer: Any) -> None:
        self.own_model = trainer.model
        self.timeout = trainer.args.ddp_timeout_delta
        self._trainer = weakref.ref(trainer)

    @property
    def calls_model(self) -> Callable[[nn.Module, Mapping[str, object]], object] | None:
        """As `training_step` calls it."""
        return self._loss_of_example

    def _loss_of_example(self, model: nn.Module, batch: Mapping[str, object]) -> object:
        trainer = self._trainer()
        assert trainer is not None
        return trainer._loss_of_example(model, batch)

    def in_training(self) -> bool:
        """Whether `train()` runs."""
        trainer = self._trainer()
        return trainer is not None and bool(trainer.is_in_train)

    def modules_beside(self) -> list[nn.Module]:
        """The modules among the Trainer's attributes."""
        trainer = self._trainer()
        found: list[nn.Module] = []
        for name, value in vars(trainer).items() if trainer is not None else ():
            values = value.values() if isinstance(value, dict) else [value]
            if name not in ("model", "model_wrapped"):
                found += [v for v in values if isinstance(v, nn.Module)]
        return found


class MicrobatchCount(Loop):
    """Tells an engine what accelerate counts, without keeping the accelerator."""

    makes_optimizer = True

    def __init__(self, ends_window: Callable[[], bool], around: TrainingLoop, scaler: DynamicLossScaler | None) -> None:
        """`ends_window`: a method of the accelerator; `scaler`: of an earlier model, because one loss may span several."""
        self.scaler = scaler
        self._ends_window = weakref.WeakMethod(ends_window)
        self._around = around

    def is_last_microbatch(self) -> bool:
        """By accelerate's count."""
        ends_window = self._ends_window()
        return ends_window is None or ends_window()

    def is_training(self) -> bool:
        """By the loop around the accelerator."""
        return self._around.in_training()
