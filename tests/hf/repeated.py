"""Searches over hyperparameters: what a rank does. HF's own loop over trials, with a study of two given rates for optuna."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hf.recipes import RECIPES, make_model

RATES = (1e-3, 5e-2)


@dataclass
class Trial:
    """One rate."""

    number: int
    params: dict[str, float] = field(default_factory=dict)
    value: float = 0.0

    def suggest_float(self, name: str, low: float, high: float, **_: Any) -> float:
        """The given one."""
        self.params[name] = RATES[self.number]
        return self.params[name]


class FixedTrial(Trial):
    """What process 0 sends to the others."""

    def __init__(self, params: dict[str, float], number: int = 0) -> None:
        super().__init__(number, dict(params))


class Study:
    """Tries the rates in their order."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def optimize(self, objective: Callable[[Trial], float], n_trials: int, **_: Any) -> None:
        """As optuna's."""
        for number in range(n_trials):
            trial = Trial(number)
            self.trials.append(trial)
            trial.value = objective(trial)

    def _is_multi_objective(self) -> bool:
        return False

    @property
    def best_trial(self) -> Trial:
        """The smallest value."""
        return min(self.trials, key=lambda trial: trial.value)


@contextmanager
def optuna() -> Iterator[None]:
    """As far as transformers imports it."""
    module: Any = types.ModuleType("optuna")
    module.__spec__ = importlib.machinery.ModuleSpec("optuna", None)
    module.create_study = lambda **_: Study()
    module.Trial = Trial
    module.trial = types.SimpleNamespace(FixedTrial=FixedTrial, BaseTrial=Trial)
    sys.modules["optuna"] = module
    try:
        yield
    finally:
        del sys.modules["optuna"]


def searched(folder: Path, config: dict[str, Any] | None, micro: int) -> dict[str, Any]:
    """Two trials of three steps and an evaluation: the best one, and every objective on this rank."""
    from transformers import Trainer, TrainingArguments

    from hf_dist import DistTrainer, DistTrainingArguments

    values: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        values.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    base, arguments = (Trainer, TrainingArguments) if config is None else (DistTrainer, DistTrainingArguments)
    changes: dict[str, Any] = {} if config is None else {"dist_config": config}
    trainer = RECIPES["even"].build(
        base, arguments, folder, micro, max_steps=3, eval_strategy="epoch", per_device_eval_batch_size=2, **changes
    )
    trainer.model_init = lambda trial=None: make_model()
    with optuna():
        best = trainer.hyperparameter_search(
            direction="minimize", backend="optuna", n_trials=len(RATES), compute_objective=objective,
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0)},
        )  # fmt: skip
    return {"best": None if best is None else (best.run_id, best.hyperparameters), "values": values}


def evaluated(folder: Path, config: dict[str, Any]) -> list[int]:
    """The loaders that accelerate lists after a training with an evaluation, and after three more and a prediction."""
    from tests.hf.on_ranks import dist_trainer

    trainer = dist_trainer("even", 1, folder, config, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    counts = [len(trainer.accelerator._dataloaders)]
    for _ in range(3):
        trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    return [*counts, len(trainer.accelerator._dataloaders)]
