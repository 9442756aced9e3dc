"""`Trainer.hyperparameter_search` with optuna, on one process and on two ranks: each trial is that of plain DDP."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest

from hf_dist.hf.evaluation import each_batch_by_itself
from tests.ecosystem.runs import arguments, over
from tests.harness import run_ranks
from tests.hf.recipes import make_model, pad, texts

pytest.importorskip("optuna", reason="optuna is not installed")
STAGES = (None, 1, 3)
TRIALS = 3


def space(trial: Any) -> dict[str, Any]:
    """The JSON's "auto" values have to follow each of them."""
    rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    return {
        "learning_rate": rate,
        "gradient_accumulation_steps": trial.suggest_categorical("gradient_accumulation_steps", [1, 2]),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def search(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """By stage: the losses of every trial, and the best one."""
    import optuna
    from transformers import Trainer, TrainerCallback, TrainingArguments

    logging.getLogger("hf_dist").setLevel(logging.ERROR)
    found = []
    for stage in STAGES:
        losses: list[list[float]] = []

        class Note(TrainerCallback):
            def on_train_begin(self, *_: Any, losses: list[list[float]] = losses, **__: Any) -> None:
                losses.append([])

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, losses: Any = losses, **_: Any
            ) -> None:
                losses[-1] += [logs[key] for key in ("loss", "grad_norm", "eval_loss") if key in logs]

        given = arguments(
            Path(folder) / str(stage), stage, False, TrainingArguments, eval_strategy="steps", eval_steps=3
        )
        trainer = over(stage, Trainer)(
            args=given, model_init=lambda trial: make_model(), train_dataset=texts(32), eval_dataset=texts(8),
            data_collator=pad, callbacks=[Note()],
        )  # fmt: skip
        sampler = optuna.samplers.RandomSampler(seed=3)
        with each_batch_by_itself(given):
            best = trainer.hyperparameter_search(
                space, n_trials=TRIALS, direction="minimize", backend="optuna", sampler=sampler,
                compute_objective=lambda metrics: metrics["eval_loss"],
            )  # fmt: skip
        found.append({"losses": losses, "best": best and (best.run_id, best.hyperparameters)})
    return found


@functools.cache
def results(world: int, folder: str) -> list[list[dict[str, Any]]]:
    """By rank; one spawn."""
    return run_ranks(search, world, (folder,), timeout=300)


@pytest.mark.parametrize("world", [1, 2])
def test_every_trial_is_that_of_the_stock_trainer(world: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank, (stock, *ours) in enumerate(results(world, str(tmp_path_factory.getbasetemp()))):
        assert len({tuple(trial) for trial in stock["losses"]}) == TRIALS, "trials differ"
        assert (stock["best"] is None) == (rank > 0)
        for found in ours:
            assert found["best"] == stock["best"]
            for trial, expected in zip(found["losses"], stock["losses"], strict=True):
                assert trial == pytest.approx(expected, rel=1e-5)
