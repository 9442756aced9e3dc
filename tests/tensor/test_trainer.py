"""The Trainer over split matrices: equal to the stock Trainer in one process, evaluation and generation included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.lifecycle import evaluate_around, train_twice
from tests.hf.on_ranks import Job, found, outcomes_by_world, record_of
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import TOLERANCE, check_equal
from tests.tensor.jobs import PROMPTS, other_data, section

OWN = "tests.tensor.jobs:"
LIFE = "tests.hf.lifecycle:"
ALL = ("plain", "label_smoothing", "override_adds", "override_own", "compute_loss_func", "lora", "moe", "checkpointing")
NAMES = ALL if FULL_GRID else ("plain", "label_smoothing", "override_own", "lora", "moe")


def train_job(recipe: str, stage: int, **more: Any) -> Job:
    return (OWN + "train", {"recipe": recipe, "stage": stage, "tp": 2, **more})


JOBS: dict[int, list[Job]] = {
    2: [
        *(train_job(name, 1) for name in NAMES),
        *((LIFE + "evaluated", {"recipe": name, "stage": 1, "config": section(2)}) for name in ("metrics", "plain")),
        (LIFE + "twice", {"recipe": "plain", "stage": 0, "config": section(2)}),
        *((OWN + "generate", {"stage": stage}) for stage in (0, 3)),
    ],
    4: [
        train_job("plain", 3),
        train_job("plain", 1, config={"pipeline": {"stages": 2}}),
        *([train_job(name, 2) for name in NAMES] if FULL_GRID else []),
        *([(LIFE + "evaluated", {"recipe": "metrics", "stage": 3, "config": section(2)})] if FULL_GRID else []),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank returned for each job, by the number of ranks."""
    return outcomes_by_world(JOBS, tmp_path_factory)


def data_ranks(world: int, job: Job) -> int:
    stages = (job[1].get("config") or {}).get("pipeline", {}).get("stages", 1)
    return int(world // (2 * stages))


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":train")]
)
def test_equals_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    ranks = found(outcomes, world, job)
    trainer: Any = RECIPES[job[1]["recipe"]].in_one_process(tmp_path, data_ranks(world, job))
    trainer.train()
    expected = record_of(trainer)
    check_equal(ranks[0], expected)
    for outcome in ranks[1:]:
        for key in ("losses", "norms", "rates"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        if data_ranks(world, job) == 1:  # several pad their rows apart
            assert outcome["flops"] == pytest.approx(trainer.state.total_flos, rel=1e-9)


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":evaluated")]
)
def test_evaluation_and_prediction_equal_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    expected = evaluate_around(RECIPES[job[1]["recipe"]].in_one_process(tmp_path, data_ranks(world, job)))
    for outcome in found(outcomes, world, job):
        for key in ("before", "after"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        if "predictions" in expected:
            assert torch.allclose(outcome["predictions"], expected["predictions"], rtol=1e-4, atol=1e-6)


def test_a_second_train_goes_on(outcomes: Any, tmp_path: Path) -> None:
    job = next(j for j in JOBS[2] if j[0].endswith(":twice"))
    check_equal(found(outcomes, 2, job)[0], train_twice(RECIPES["plain"].in_one_process(tmp_path, 1, max_steps=4)))


@pytest.mark.parametrize("stage", [0, 3])
def test_generation_gives_the_tokens_of_the_saved_model(stage: int, outcomes: Any) -> None:
    ranks = found(outcomes, 2, (OWN + "generate", {"stage": stage}))
    model = AutoModelForCausalLM.from_pretrained(ranks[0]["folder"]).eval()
    for name, how in ranks[0]["asked"].items():
        torch.manual_seed(3)
        with torch.no_grad():
            tokens = model.generate(PROMPTS, max_new_tokens=6, pad_token_id=0, **how)
        for outcome in ranks:
            assert torch.equal(outcome[name], tokens), name
    with torch.no_grad():
        logits = model(input_ids=PROMPTS).logits
    for outcome in ranks:
        assert torch.allclose(outcome["logits"], logits, atol=1e-5)
        assert outcome["num_parameters"] == model.num_parameters()


def test_a_rank_that_reads_other_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 reads another batch than rank 0"):
        run_ranks(other_data, 2, (str(tmp_path),))
