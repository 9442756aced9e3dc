"""The Trainer with split sequences: equal to the stock Trainer, evaluation and generation included; resumed in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import run_ranks
from tests.hf.lifecycle import evaluate_around
from tests.hf.on_ranks import Job, found, outcomes_by_world, record_of, run_jobs
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import TOLERANCE, check_equal
from tests.sequence.jobs import split_over

OWN, LIFE = "tests.sequence.jobs:", "tests.hf.lifecycle:"
NAMES = (
    *("plain", "label_smoothing", "override_adds", "override_own", "compute_loss_func", "classifier"),
    *("lora", "moe", "checkpointing", "group_by_length"),
)


def train_job(recipe: str, stage: int, exchange: str = "auto") -> Job:
    return (OWN + "train", {"recipe": recipe, "stage": stage, "config": split_over(2, exchange)})


def evaluated_job(recipe: str, stage: int) -> Job:
    return (LIFE + "evaluated", {"recipe": recipe, "stage": stage, "config": split_over(2)})


COPIES = split_over(2, zero_optimization={"stage": 3, "mics_shard_size": 1})
"""Both ranks of a sequence hold all states."""
JOBS: dict[int, list[Job]] = {
    2: [
        *(train_job(name, 3) for name in NAMES),
        *(train_job("plain", stage, exchange) for stage, exchange in ((1, "ring"), (2, "gather"))),
        *(evaluated_job(name, 3) for name in ("metrics", "plain")),
        *((OWN + "generate", {"stage": stage}) for stage in (0, 3)),
        (OWN + "dropout", {}),
        *((OWN + "saved", {"stage": 1, "config": config, "accumulation": 3}) for config in (split_over(2), COPIES)),
    ],
    4: [*(train_job(name, 3) for name in ("plain", "override_own", "classifier")), evaluated_job("metrics", 3)],
}  # fmt: skip
"""Ranks -> jobs; two ranks share the rows of each data rank."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank returned for each job, by the number of ranks."""
    return outcomes_by_world(JOBS, tmp_path_factory)


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":train")]
)
def test_equals_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    ranks = found(outcomes, world, job)
    trainer = RECIPES[job[1]["recipe"]].in_one_process(tmp_path, world // 2)
    trainer.train()
    expected = record_of(trainer)
    check_equal(ranks[0], expected)
    if world == 2:  # several data ranks pad their rows apart
        assert ranks[0]["flops"] == pytest.approx(trainer.state.total_flos, rel=1e-9)
    for outcome in ranks[1:]:  # every rank logs the true values
        for key in ("losses", "norms", "rates"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
    for outcome in ranks:  # as many steps per epoch as in one process
        assert (outcome["steps"], outcome["epoch"]) == (trainer.state.global_step, trainer.state.epoch)


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":evaluated")]
)
def test_evaluation_and_prediction_equal_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    expected = evaluate_around(RECIPES[job[1]["recipe"]].in_one_process(tmp_path, world // 2))
    for outcome in found(outcomes, world, job):
        for key in ("before", "after"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        assert torch.allclose(outcome["predictions"], expected["predictions"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_generation_equals_the_saved_model(stage: int, outcomes: Any) -> None:
    ranks = found(outcomes, 2, (OWN + "generate", {"stage": stage}))
    model = AutoModelForCausalLM.from_pretrained(ranks[0]["folder"]).eval()
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        torch.manual_seed(11)
        sampled = model.generate(prompt, max_new_tokens=6, do_sample=True, pad_token_id=0)
        logits = model(input_ids=prompt).logits
    for outcome in ranks:
        assert torch.equal(outcome["tokens"], tokens)
        assert torch.equal(outcome["sampled"], sampled)
        assert torch.allclose(outcome["logits"], logits, rtol=1e-5, atol=1e-6)


def test_dropout_leaves_the_random_numbers_alike_on_ranks_that_share_rows(outcomes: Any) -> None:
    first, second = found(outcomes, 2, (OWN + "dropout", {}))
    assert first == second
    assert len(set(first["losses"])) == 4


RESUMED = [  # of which job, by how many ranks, of which share rows, ZeRO stage, accumulation
    (0, 1, split_over(1), 0, 3),
    (0, 3, split_over(1), 3, 1),
    (0, 3, split_over(3), 2, 3),
    (0, 2, COPIES, 3, 3),
    (1, 1, split_over(1), 0, 3),
]


def test_resumes_with_any_number_of_ranks_that_share_rows(outcomes: Any, tmp_path: Path) -> None:
    jobs_saved = [j for j in JOBS[2] if j[0].endswith(":saved")]
    for number, (saved, world, config, stage, accumulation) in enumerate(RESUMED):
        whole = found(outcomes, 2, jobs_saved[saved])[0]
        options = {"saved_by": whole["checkpoint"], "stage": stage, "config": config, "accumulation": accumulation}
        jobs = [(OWN + "resumed", options)]
        outcome = run_ranks(run_jobs, world, (jobs, str(tmp_path / str(number))), timeout=400)[0][0]
        assert not isinstance(outcome, str), outcome
        assert len(outcome["losses"]) == len(whole["losses"])
        check_equal(outcome, whole)
