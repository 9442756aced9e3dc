"""The Trainer over pipeline stages: equal to the stock Trainer, evaluation and generation included; resumed in any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import run_ranks
from tests.hf.lifecycle import evaluate_around, train_twice
from tests.hf.on_ranks import Job, found, outcomes_by_world, record_of, run_jobs
from tests.hf.pipelined import other_data, pipeline_of, precision, seq2seq
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import TOLERANCE, check_equal

OWN = "tests.hf.pipelined:"
LIFE = "tests.hf.lifecycle:"
NAMES = (
    *("plain", "label_smoothing", "override_adds", "override_own", "compute_loss_func", "classifier"),
    *("classifier_override", "lora", "moe", "checkpointing", "group_by_length", "no_clipping", "cosine"),
)


def train_job(recipe: str, stage: int, pp: int) -> Job:
    return (OWN + "train", {"recipe": recipe, "stage": stage, "pp": pp})


# Ranks -> jobs. Two ranks: two stages, one data rank. Four: two stages x two data ranks, and four stages.
JOBS: dict[int, list[Job]] = {
    2: [
        *(train_job(name, 1, 2) for name in NAMES),
        *((LIFE + "evaluated", {"recipe": name, "stage": 1, "config": pipeline_of(2)}) for name in ("metrics", "plain")),
        (LIFE + "twice", {"recipe": "plain", "stage": 0, "config": pipeline_of(2)}),
        *((OWN + "generate", {"stage": stage}) for stage in (0, 3)),
        (OWN + "seq2seq", {"pp": 2}),
        (OWN + "dropout", {}),
        (OWN + "one_after_the_other", {}),
        *((OWN + "precision", {"dtype": dtype, "pp": 2}) for dtype in ("bf16", "fp16")),
        (OWN + "saved", {"pp": 2, "stage": 1, "accumulation": 3}),
    ],
    4: [
        *(train_job(name, 3, 2) for name in ("plain", "label_smoothing", "classifier", "lora", "moe")),
        (LIFE + "evaluated", {"recipe": "metrics", "stage": 3, "config": pipeline_of(2)}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank returned for each job, by the number of ranks."""
    return outcomes_by_world(JOBS, tmp_path_factory)


def stock(recipe: str, data_ranks: int, folder: Path, **changes: Any) -> Any:
    """The stock Trainer on the batches that the data ranks see together."""
    return RECIPES[recipe].in_one_process(folder, data_ranks, **changes)


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":train")]
)
def test_equals_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    ranks = found(outcomes, world, job)
    trainer = stock(job[1]["recipe"], world // job[1]["pp"], tmp_path)
    trainer.train()
    expected = record_of(trainer)
    check_equal(ranks[0], expected)
    for outcome in ranks[1:]:  # every rank logs the true values
        for key in ("losses", "norms", "rates"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("world", "job"), [(w, j) for w, jobs in JOBS.items() for j in jobs if j[0].endswith(":evaluated")]
)
def test_evaluation_and_prediction_equal_the_stock_trainer(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    trainer = stock(job[1]["recipe"], world // 2, tmp_path)
    expected = evaluate_around(trainer)
    for outcome in found(outcomes, world, job):
        for key in ("before", "after"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        if "predictions" in expected:
            assert torch.allclose(outcome["predictions"], expected["predictions"], rtol=1e-4, atol=1e-6)


def test_a_second_train_goes_on(outcomes: Any, tmp_path: Path) -> None:
    job = next(j for j in JOBS[2] if j[0].endswith(":twice"))
    check_equal(found(outcomes, 2, job)[0], train_twice(stock("plain", 1, tmp_path, max_steps=4)))


@pytest.mark.parametrize("stage", [0, 3])
def test_generation_with_a_cache_equals_the_saved_model(stage: int, outcomes: Any) -> None:
    ranks = found(outcomes, 2, (OWN + "generate", {"stage": stage}))
    model = AutoModelForCausalLM.from_pretrained(ranks[0]["folder"]).eval()
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        logits = model(input_ids=prompt).logits
    for outcome in ranks:
        assert torch.equal(outcome["tokens"], tokens)
        assert torch.allclose(outcome["logits"], logits, rtol=1e-5, atol=1e-6)


def test_what_would_silently_be_a_part_is_refused(outcomes: Any) -> None:
    for outcome in found(outcomes, 2, (OWN + "generate", {"stage": 0})):
        assert "trainer.save_model()" in outcome["state_dict"]
        assert "engine.train_batch" in outcome["gradients"]


def test_seq2seq_with_generation(outcomes: Any, tmp_path: Path) -> None:
    expected = seq2seq(tmp_path, 0)
    for outcome in found(outcomes, 2, (OWN + "seq2seq", {"pp": 2})):
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["eval"] == pytest.approx(expected["eval"], rel=TOLERANCE)
        assert torch.equal(outcome["tokens"], expected["tokens"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_equals_one_process_of_ours(dtype: str, outcomes: Any, tmp_path: Path) -> None:
    expected = precision(tmp_path, dtype, 1)
    for outcome in found(outcomes, 2, (OWN + "precision", {"dtype": dtype, "pp": 2})):
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        # fp16 begins with a loss scale that overflows: two steps are skipped
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE, nan_ok=True)
        assert not math.isnan(outcome["norms"][-1])


def test_the_main_process_is_first_for_the_other_stages_too(outcomes: Any) -> None:
    assert found(outcomes, 2, (OWN + "one_after_the_other", {})) == [True, True]


def test_dropout_leaves_the_data_alike_on_all_stages(outcomes: Any) -> None:
    first, second = found(outcomes, 2, (OWN + "dropout", {}))
    assert first == second
    assert len(set(first)) == 4


def test_stages_that_read_other_data_are_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pipeline stage 0 reads other data"):
        run_ranks(other_data, 2, (str(tmp_path),))


RESUMED = [(1, 1, 0, 3), (2, 2, 3, 3), (3, 1, 3, 1), (6, 2, 2, 1)]  # ranks, stages, ZeRO stage, accumulation


def test_resumes_on_any_number_of_stages(outcomes: Any, tmp_path: Path) -> None:
    job = next(j for j in JOBS[2] if j[0].endswith(":saved"))
    whole = found(outcomes, 2, job)[0]
    for number, (world, pp, stage, accumulation) in enumerate(RESUMED):
        options = {"saved_by": whole["checkpoint"], "pp": pp, "stage": stage, "accumulation": accumulation}
        jobs = [(OWN + "resumed", options)]
        outcome = run_ranks(run_jobs, world, (jobs, str(tmp_path / str(number))), timeout=400)[0][0]
        assert not isinstance(outcome, str), outcome
        assert len(outcome["losses"]) == len(whole["losses"])
        check_equal(outcome, whole)
