"""What a rank does in the tests of the HF seam: a list of jobs in one spawn, each a function of this package's modules."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from tests.attempts import attempts
from tests.hf.recipes import RECIPES
from tests.references import shared


def run_jobs(rank: int, world: int, jobs: list[tuple[str, dict[str, Any]]], folder: str) -> list[Any]:
    """The result of each job (function name in this module or `module:name`, its arguments); a traceback where it raised."""
    import importlib

    def run(index: int, name: str, kwargs: dict[str, Any]) -> Any:
        module, _, function = name.rpartition(":")
        job = getattr(importlib.import_module(module or __name__), function)
        return job(Path(folder) / str(index), **kwargs)

    return attempts(rank, world, (functools.partial(run, index, *job) for index, job in enumerate(jobs)))


Job = tuple[str, dict[str, Any]]
"""`module:function`, and its arguments beside the folder."""


def outcomes_by_world(jobs: Mapping[int, list[Job]], folders: Any) -> Callable[[int], dict[str, list[Any]]]:
    """`outcomes(world)[str(job)]`: what every rank returned; one spawn per number of ranks, when it is asked for.

    `folders`: pytest's `tmp_path_factory`.
    """

    @functools.cache
    def run(world: int) -> dict[str, list[Any]]:
        from tests.harness import run_ranks

        folder = str(folders.mktemp(f"world{world}"))
        ranks = run_ranks(run_jobs, world, (jobs[world], folder), timeout=900)
        return {str(job): [rank[i] for rank in ranks] for i, job in enumerate(jobs[world])}

    return run


def found(outcomes: Callable[[int], dict[str, list[Any]]], world: int, job: Job) -> list[Any]:
    """What every rank returned for `job`; fails where one of them raised."""
    ranks = outcomes(world)[str(job)]
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
    return ranks


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full weights by name, on the main rank; every rank calls it."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {name: value.detach().clone() for name, value in state.items()}


def record_of(trainer: Trainer) -> dict[str, Any]:
    """What two runs are compared by."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "weights": weights_of(trainer),
    }


def dist_trainer(recipe: str, stage: int, folder: Path, config: Any = None, **changes: Any) -> Any:
    """A DistTrainer with micro batches of two rows."""
    from hf_dist import DistTrainer, DistTrainingArguments

    config = {"zero_optimization": {"stage": stage}, **(config or {})}
    return RECIPES[recipe].build(DistTrainer, DistTrainingArguments, folder, 2, dist_config=config, **changes)


def totals(trainer: Any) -> dict[str, Any]:
    """What a Trainer counts: steps, epochs, operations, elements of the model and of what trains."""
    state, model = trainer.state, trainer.model
    elements = (trainer.get_num_trainable_parameters(), getattr(model, "num_parameters", int)())
    return {"steps": state.global_step, "epoch": state.epoch, "flops": state.total_flos, "elements": elements}


def stock_record(recipe: str, data_ranks: int, **changes: Any) -> dict[str, Any]:
    """What the stock Trainer makes of a recipe in one process, on the rows of all data ranks; once per test run."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trainer: Any = RECIPES[recipe].in_one_process(folder, data_ranks, **changes)
            trainer.train()
            return {**record_of(trainer), **totals(trainer)}

    return shared(("stock Trainer", recipe, data_ranks, sorted(changes.items())), run)


def train(folder: Path, recipe: str, stage: int, **changes: Any) -> dict[str, Any]:
    """One recipe at one stage."""
    trainer = dist_trainer(recipe, stage, folder, **changes)
    trainer.train()
    return record_of(trainer)
