"""DistTrainer on ranks equals the stock Trainer in one process on the joined batches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.hf.lifecycle import json_optimizer_by_hand, own_loop, stock_evaluated, train_twice
from tests.hf.on_ranks import record_of, run_jobs, stock_record
from tests.hf.recipes import RECIPES

TOLERANCE = 1e-5
EVERY_STAGE = (
    *("plain", "label_smoothing", "override_adds", "override_own", "compute_loss_func", "classifier"),
    *("classifier_override", "lora", "moe"),
)
OPTIMIZERS = ("adamw_torch_fused", "sgd", "adagrad", "rmsprop")
STAGES = {name: (0, 1, 2, 3) if name in EVERY_STAGE else (3,) for name in RECIPES} | {
    name: (1, 3) for name in OPTIMIZERS
}
for name in ("dropout", "random_collator", "even", "metrics"):
    del STAGES[name]
TWO_EPOCHS = ("plain", "group_by_length", "cosine")


def epochs(recipe: str) -> dict[str, int]:
    """One is enough where nothing begins with the second; one step in four is the short last window of an epoch in any case."""
    return {} if FULL_GRID or recipe in TWO_EPOCHS else {"num_train_epochs": 1}


LIFE = "tests.hf.lifecycle:"
Job = tuple[str, dict[str, Any]]
CASES: list[tuple[Job, int]] = [
    *((("train", {"recipe": name, "stage": stage, **epochs(name)}), 2) for name in STAGES for stage in STAGES[name]),
    *(
        (("train", {"recipe": name, "stage": stage, **epochs(name)}), 1)
        for name in ("plain", "classifier")
        for stage in (0, 3)
    ),
    *(((LIFE + "json_optimizer", {"stage": stage}), 2) for stage in (0, 1, 2, 3)),
    *(((LIFE + "json_section", {"stage": 2, "section": section}), 2) for section in ("optimizer", "scheduler")),
    *(((LIFE + "twice", {"recipe": "plain", "stage": stage}), 2) for stage in (1, 3)),
    *(
        ((LIFE + "evaluated", {"recipe": name, "stage": stage, **epochs(name)}), 2)
        for name in ("metrics", "plain")
        for stage in (0, 3)
    ),
    *(((LIFE + "raw_loop", {"stage": stage}), 2) for stage in (0, 1, 2, 3)),
]


def named(case: tuple[Job, int]) -> str:
    """What tells cases apart."""
    (function, arguments), world = case
    words = [
        function.rpartition(":")[2],
        *(str(arguments[key]) for key in ("recipe", "section", "stage") if key in arguments),
    ]
    return "-".join([*words, f"w{world}"])


FEW = (
    *("train-plain-3-w2", "train-label_smoothing-1-w2", "train-override_adds-0-w2", "train-override_own-1-w2"),
    *("train-compute_loss_func-3-w2", "train-moe-3-w2", "train-classifier-3-w1", "train-classifier_override-3-w2"),
    *("json_optimizer-0-w2", "json_section-scheduler-2-w2", "evaluated-metrics-3-w2", "raw_loop-3-w2"),
)
"""Every stage and way to make a loss, and every job but a second training, which `test_lifetimes.py` has.

Optimizers: `test_optimizer_names.py`; adapters: `test_peft.py`; other recipes: `test_layouts_in_trainer.py`.
"""
CASES = list(some_of({named(case): case for case in CASES}, *FEW).values())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(world)[job]` as the main rank saw it; one spawn per world size."""

    @functools.cache
    def run(world: int) -> dict[str, Any]:
        jobs = [job for job, ranks in CASES if ranks == world]
        folder = str(tmp_path_factory.mktemp(f"world{world}"))
        return dict(zip(map(str, jobs), run_ranks(run_jobs, world, (jobs, folder), timeout=800)[0], strict=True))

    return run


@functools.cache
def expected(job: str, recipe: str, world: int, folder: Path) -> dict[str, Any]:
    """The same in one process with stock classes."""
    if job == "raw_loop":
        return one_process_loop()
    if job == "train":
        return stock_record(recipe, world, **epochs(recipe))
    if job == "evaluated":
        return stock_evaluated(recipe, world, **epochs(recipe))
    changes: dict[str, Any] = {"max_steps": 4} if job == "twice" else {}
    if job == "json_section":
        trainer: Any = RECIPES["plain"].in_one_process(folder, world)
        trainer.args.warmup_steps = 3
        return json_optimizer_by_hand(trainer, warmup=3, total=8, sections=(recipe,))
    trainer = RECIPES[recipe].in_one_process(folder, world, **changes)
    if job == "json_optimizer":
        trainer.args.warmup_steps = 3
        return json_optimizer_by_hand(trainer, warmup=3, total=8)
    assert job == "twice"
    return train_twice(trainer)


def one_process_loop() -> dict[str, Any]:
    """`own_loop` with plain accelerate; its batches and schedule are those of two ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # accelerate steps a schedule once per process and optimizer step
    losses, norms, rates, model = own_loop(accelerator, 4, schedule_stride=2)
    return {"losses": losses, "norms": norms, "rates": rates, "weights": dict(model.state_dict())}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def check_equal(outcome: dict[str, Any], reference: dict[str, Any]) -> None:
    """Logs and weights agree, and the run moved: two runs that do nothing agree as well."""
    assert len(reference["losses"]) > 2
    assert len(set(reference["losses"])) > 2
    for key in ("losses", "norms", "rates"):
        assert outcome[key] == pytest.approx(reference[key], rel=TOLERANCE), key
    weights, wanted = outcome["weights"], reference["weights"]
    assert weights.keys() == wanted.keys()
    worst = max(weights, key=lambda name: relative(weights[name], wanted[name]))
    assert relative(weights[worst], wanted[worst]) < TOLERANCE, worst


@pytest.mark.parametrize(
    ("job", "world"),
    [
        pytest.param(job, world, id="-".join([job[0].rpartition(":")[2], *map(str, job[1].values()), f"w{world}"]))
        for job, world in CASES
    ],
)
def test_equals_the_stock_trainer_on_the_joined_batch(
    job: Job, world: int, outcomes: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcome = outcomes(world)[str(job)]
    assert not isinstance(outcome, str), outcome
    name, arguments = job[0].rpartition(":")[2], job[1]
    recipe = arguments.get("recipe") or arguments.get("section", "plain")
    reference = expected(name, recipe, world, tmp_path_factory.getbasetemp())
    check_equal(outcome, reference)
    for key in ("before", "after"):
        assert outcome.get(key, {}) == pytest.approx(reference.get(key, {}), rel=TOLERANCE)
    if name == "evaluated" and arguments["recipe"] == "metrics":
        assert outcome["after"].keys() == {"loss", "accuracy", "order"}
        assert torch.allclose(outcome["predictions"], reference["predictions"], rtol=1e-4, atol=1e-6)


def test_warmup_decay_from_the_json_takes_its_numbers_from_the_arguments(outcomes: Any) -> None:
    rates = outcomes(2)[str((LIFE + "json_optimizer", {"stage": 3 if FULL_GRID else 0}))]["rates"]
    # Peak 5e-3 after three steps of warm-up (which begin at -1), then down to 0 over the other five.
    assert rates == pytest.approx([0, 0, 5e-3 * 0.6309298, 5e-3, 5e-3, 4e-3, 3e-3, 2e-3][: len(rates)], rel=1e-6)


def test_a_trainer_without_a_config_is_the_stock_trainer(tmp_path: Path) -> None:
    from hf_dist import DistAccelerator, DistTrainer, DistTrainingArguments

    recipe = RECIPES["plain"]
    ours = recipe.build(DistTrainer, DistTrainingArguments, tmp_path, 4, max_steps=3)
    stock = recipe.build(Trainer, TrainingArguments, tmp_path, 4, max_steps=3)
    assert not isinstance(ours.accelerator, DistAccelerator)
    assert ours.dist is None
    for trainer in (ours, stock):
        trainer.train()
    mine, theirs = record_of(ours), record_of(stock)
    assert mine["losses"] == theirs["losses"]
    assert all(torch.equal(mine["weights"][n], w) for n, w in theirs["weights"].items())


def test_only_the_evaluation_that_sharded_the_model_leaves_out_its_time(tmp_path: Path) -> None:
    from hf_dist import DistTrainer, DistTrainingArguments

    trainer = RECIPES["plain"].build(
        DistTrainer, DistTrainingArguments, tmp_path, 4, dist_config={"zero_optimization": {"stage": 3}}
    )
    first, second = trainer.evaluate(), trainer.evaluate()
    assert "eval_model_preparation_time" in first
    assert "eval_model_preparation_time" not in second
    assert min(first["eval_runtime"], second["eval_runtime"]) > 0
