"""The Trainer over stages, split matrices and split sequences equals the stock Trainer, before and after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import run_ranks
from tests.hf.layout_jobs import PROMPTS, decoded, matrices, other_data, sequences, stages, stock
from tests.hf.lifecycle import stock_evaluated, train_twice
from tests.hf.on_ranks import Job, found, outcomes_by_world, run_jobs
from tests.hf.pipelined import precision, seq2seq
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import TOLERANCE, check_equal

OWN, LIFE, PIPELINED = "tests.hf.layout_jobs:", "tests.hf.lifecycle:", "tests.hf.pipelined:"
PP, TP, CP = stages(2), matrices(2), sequences(2)
NAMES = (
    *("plain", "label_smoothing", "override_adds", "override_own", "compute_loss_func", "classifier"),
    *("lora", "moe", "checkpointing", "group_by_length"),
)
COPIES = sequences(2, zero_optimization={"stage": 3, "mics_shard_size": 1})
"""Both ranks of a sequence hold all states."""
OVER = {**CP, "zero_optimization": {"stage": 2, "mics_shard_size": 2}, "hf_dist": {"optimizer_over": "all"}}
"""Of four ranks two hold a shard, and pieces of its optimizer state."""


def job(function: str, **arguments: Any) -> Job:
    return (OWN + function, arguments)


AT_ONCE: dict[str, Any] = {
    "train_sampling_strategy": "group_by_length",
    **{"warmup_steps": 1, "max_grad_norm": 0.0, "gradient_checkpointing": True},
}
"""One case has the recipes `group_by_length`, `no_clipping` and `checkpointing`, too: an order of rows, a schedule, a norm and
a block ask nothing of each other."""


def length(recipe: str, data_ranks: int) -> dict[str, Any]:
    """Of a run: an epoch of three steps, in the last of which a rank has one microbatch only."""
    if FULL_GRID:
        return {}
    return {"rows": 14 * data_ranks, "num_train_epochs": 1, **(AT_ONCE if recipe == "cosine" else {})}


def train_job(recipe: str, stage: int, layout: dict[str, Any], data_ranks: int = 1) -> Job:
    return job("train", recipe=recipe, stage=stage, layout=layout, **length(recipe, data_ranks))


BETWEEN: dict[str, Any] = {"num_train_epochs": 1} if FULL_GRID else {"max_steps": 3}
"""Two evaluations."""


def evaluated_job(recipe: str, stage: int, layout: dict[str, Any]) -> Job:
    return (LIFE + "evaluated", {"recipe": recipe, "stage": stage, "config": layout, **BETWEEN})


def generate_job(stage: int, layout: dict[str, Any]) -> Job:
    how = {"pipeline": ["greedy"], "sequence_parallel_size": ["greedy", "sampled"]}.get(next(iter(layout)))
    return job("generate", stage=stage, layout=layout, how=how or ["greedy", "sampled", "static"])


ON_TWO = [
    *((name, 1, PP) for name in (*NAMES, "classifier_override", "no_clipping", "cosine")),
    *((name, 1, TP) for name in NAMES if name not in ("classifier", "group_by_length")),
    *((name, 3, CP) for name in NAMES),
    *(("plain", stage, sequences(2, exchange)) for stage, exchange in ((1, "ring"), (2, "gather"))),
]
FEW = {"label_smoothing": PP, "compute_loss_func": PP, "cosine": PP, "moe": TP, "lora": CP}
"""Every way to make a loss, here, on four ranks or (a classifier's) in `EVALUATED`. Exchanges: `parallel/sequence/`."""
ON_TWO = ON_TWO if FULL_GRID else [case for case in ON_TWO[:-2] if case[2] is FEW.get(case[0])]
ON_FOUR = [
    *((name, 3, PP) for name in ("plain", "label_smoothing", "classifier", "lora", "moe")),
    *((name, 3, CP) for name in ("plain", "override_own", "classifier")),
    *((name, 2, OVER) for name in ("plain", "lora", "compute_loss_func")),
    *((name, 2, TP) for name in ("plain", "label_smoothing", "override_own", "lora", "moe")),
    ("plain", 3, TP),
    ("plain", 1, {**TP, **PP}),
]
ON_FOUR = ON_FOUR if FULL_GRID else [case for case in ON_FOUR if case == ("override_own", 3, CP)]


SAVED = [job("saved", stage=1, layout=layout, accumulation=3) for layout in ((PP, CP, COPIES) if FULL_GRID else (PP,))]
HALF = [
    (PIPELINED + "precision", {"dtype": dtype, "pp": 2}) for dtype in (("bf16", "fp16") if FULL_GRID else ("fp16",))
]
SEQ2SEQ: Job = (PIPELINED + "seq2seq", {"pp": 2})
EVALUATED = [
    ("metrics", 1, PP),
    ("metrics", 1, TP),
    ("metrics", 3, CP),
    ("averaged", 1, PP),
    ("averaged", 3, TP),
    ("plain", 1, PP),
    ("plain", 1, TP),
    ("plain", 3, CP),
]
EVALUATED = EVALUATED if FULL_GRID else [EVALUATED[0], EVALUATED[4]]
GENERATED = [(stage, layout) for layout in (PP, TP, CP) for stage in (0, 3)]
GENERATED = GENERATED if FULL_GRID else GENERATED[::3]  # sequences: `parallel/sequence/test_whole_calls.py`
DROPOUT = (PP, CP) if FULL_GRID else (PP,)
JOBS: dict[int, list[Job]] = {
    2: [
        *(train_job(*case) for case in ON_TWO),
        *(evaluated_job(*case) for case in EVALUATED),
        *((LIFE + "twice", {"recipe": "plain", "stage": 0, "config": layout}) for layout in (PP, TP) if FULL_GRID),
        *(generate_job(*case) for case in GENERATED),
        *(job("dropout", layout=layout) for layout in DROPOUT),
        job("one_after_the_other", layout=PP),
        job("counted"),
        *SAVED, *HALF, SEQ2SEQ,
    ],
    4: [
        *(train_job(*case, data_ranks=2 if case[2] in (PP, TP, CP, OVER) else 1) for case in ON_FOUR),
        *(evaluated_job("metrics", 3, layout) for layout in (PP, TP, CP) if FULL_GRID),
    ],
}  # fmt: skip
"""Ranks -> jobs; two ranks, or four of `TP` and `PP` together, share the rows of each data rank."""


def named(function: str) -> Any:
    """Every job of a function as a case."""
    cases = [(world, job) for world, jobs in JOBS.items() for job in jobs if job[0].endswith(f":{function}")]
    ids = [f"{name_of(job)}-{world} ranks" for world, job in cases]
    return pytest.mark.parametrize(("world", "job"), cases, ids=ids)


def layout_of(job: Job) -> dict[str, Any]:
    layout: dict[str, Any] = job[1].get("layout") or job[1]["config"]
    return layout


def name_of(job: Job) -> str:
    """The recipe, stage and layout."""
    layout, exchange = layout_of(job), layout_of(job).get("hf_dist", {}).get("sequence_parallel", "auto")
    axes = {"pipeline": "stages", "tensor_parallel": "matrices", "sequence_parallel_size": "sequences"}
    words = [job[1].get("recipe", ""), f"z{job[1]['stage']}", *(axes[key] for key in layout if key in axes)]
    return "-".join(filter(None, [*words, "" if exchange == "auto" else exchange]))


def data_ranks(world: int, job: Job) -> int:
    return world // (4 if {"pipeline", "tensor_parallel"} <= layout_of(job).keys() else 2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank returned for each job, by the number of ranks."""
    return outcomes_by_world(JOBS, tmp_path_factory)


@named("train")
def test_equals_the_stock_trainer(world: int, job: Job, outcomes: Any) -> None:
    ranks, several = found(outcomes, world, job), data_ranks(world, job)
    expected = stock(job[1]["recipe"], several, **length(job[1]["recipe"], several))
    check_equal(ranks[0], expected)
    for outcome in ranks:  # every rank logs the true values, and as many steps per epoch as one process
        for key in ("losses", "norms", "rates"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        assert (outcome["steps"], outcome["epoch"]) == (expected["steps"], expected["epoch"])
        assert outcome["elements"] == expected["elements"]
        if several == 1:  # several pad their rows apart
            assert outcome["flops"] == pytest.approx(expected["flops"], rel=1e-9)


@named("evaluated")
def test_evaluation_and_prediction_equal_the_stock_trainer(world: int, job: Job, outcomes: Any) -> None:
    expected = stock_evaluated(job[1]["recipe"], data_ranks(world, job), **BETWEEN)
    for outcome in found(outcomes, world, job):
        for key in ("before", "after"):
            assert outcome[key] == pytest.approx(expected[key], rel=TOLERANCE)
        if "predictions" in expected:
            assert torch.allclose(outcome["predictions"], expected["predictions"], rtol=1e-4, atol=1e-6)


@FULL_GRID_ONLY  # a search trains again over stages: `test_repeated_trainings.py`
@named("twice")
def test_a_second_train_goes_on(world: int, job: Job, outcomes: Any, tmp_path: Path) -> None:
    alone = train_twice(RECIPES["plain"].in_one_process(tmp_path, 1, max_steps=4))
    check_equal(found(outcomes, world, job)[0], alone)


@named("generate")
def test_generation_gives_the_tokens_of_the_saved_model(world: int, job: Job, outcomes: Any) -> None:
    ranks = found(outcomes, world, job)
    model = AutoModelForCausalLM.from_pretrained(ranks[0]["folder"]).eval()
    for how in job[1]["how"]:
        with torch.no_grad():
            tokens = decoded(model, how)
        for outcome in ranks:
            assert torch.equal(outcome[how], tokens), how
    with torch.no_grad():
        logits = model(input_ids=PROMPTS).logits
    for outcome in ranks:
        assert torch.allclose(outcome["logits"], logits, rtol=1e-5, atol=1e-5)
        if "pipeline" not in layout_of(job):  # else of this rank's stages
            assert outcome["num_parameters"] == model.num_parameters()
        elif job[1]["stage"] == 0:  # what would silently be a part is refused
            assert "trainer.save_model()" in outcome["state_dict"]
            assert "engine.train_batch" in outcome["gradients"]


def test_seq2seq_with_generation(outcomes: Any, tmp_path: Path) -> None:
    expected = seq2seq(tmp_path, 0)
    for outcome in found(outcomes, 2, SEQ2SEQ):
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["eval"] == pytest.approx(expected["eval"], rel=TOLERANCE)
        assert torch.equal(outcome["tokens"], expected["tokens"])


@pytest.mark.parametrize("half", HALF, ids=lambda job: str(job[1]["dtype"]))
def test_half_precision_equals_one_process_of_ours(half: Job, outcomes: Any, tmp_path: Path) -> None:
    expected = precision(tmp_path, half[1]["dtype"], 1)
    for outcome in found(outcomes, 2, half):
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        # fp16 begins with a loss scale that overflows: two steps are skipped
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE, nan_ok=True)
        assert not math.isnan(outcome["norms"][-1])


def test_the_main_process_is_first_for_the_other_stages_too(outcomes: Any) -> None:
    assert found(outcomes, 2, job("one_after_the_other", layout=PP)) == [True, True]


def test_rows_and_tokens_are_counted_once_however_many_stages_they_pass(outcomes: Any) -> None:
    assert found(outcomes, 2, job("counted")) == [(8, 8 * 8 / 2)] * 2, "two ranks share the work on the tokens"


@pytest.mark.parametrize("layout", DROPOUT, ids=["stages", "sequences"][: len(DROPOUT)])
def test_dropout_leaves_the_data_alike_on_ranks_that_share_rows(layout: dict[str, Any], outcomes: Any) -> None:
    first, second = found(outcomes, 2, job("dropout", layout=layout))
    assert first["losses"] == second["losses"]
    assert len(set(first["losses"])) == 4
    assert first["same batch"] == second["same batch"] and len(set(first["same batch"])) == 2
    if layout is CP:  # whoever shares rows but no layers draws alike
        assert first["next"] == second["next"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        pytest.param(PP, "pipeline stage 1 reads other data than that of stage 0", id="stages"),
        # By default `parallel/sequence/test_refusals.py`.
        pytest.param(TP, "rank 1 reads another batch than rank 0", id="matrices", marks=FULL_GRID_ONLY),
    ],
)
def test_a_rank_that_reads_other_data_is_named(layout: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_ranks(other_data, 2, (str(tmp_path), layout))


RESUMED = [  # which of `SAVED`, by how many ranks, the layout, ZeRO stage, accumulation
    (0, 1, {}, 0, 3), (0, 2, PP, 3, 3), (0, 3, {}, 3, 1), (0, 6, PP, 2, 1),
    (1, 1, {}, 0, 3), (1, 3, {}, 3, 1), (1, 3, sequences(3), 2, 3), (1, 2, COPIES, 3, 3), (2, 1, {}, 0, 3),
]  # fmt: skip
RESUMED = RESUMED if FULL_GRID else RESUMED[:2]


@pytest.mark.parametrize("number", range(len(RESUMED)))
def test_resumes_in_any_layout(number: int, outcomes: Any, tmp_path: Path) -> None:
    saved, world, layout, stage, accumulation = RESUMED[number]
    whole = found(outcomes, 2, SAVED[saved])[0]
    jobs = [job("resumed", saved_by=whole["checkpoint"], stage=stage, layout=layout, accumulation=accumulation)]
    outcome = run_ranks(run_jobs, world, (jobs, str(tmp_path / str(number))), timeout=400)[0][0]
    assert not isinstance(outcome, str), outcome
    assert len(outcome["losses"]) == len(whole["losses"])
    check_equal(outcome, whole)
