"""What a resume says of a changed argument is what the run then does: every sentence of `resumed_arguments`, and no other."""

from __future__ import annotations

import functools
import logging
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.hf import resumed_arguments
from tests.covering import FULL_GRID
from tests.hf.loss_kinds import CLASSES, LENGTH, Net
from tests.hf.on_ranks import weights_of

RATE, SAVED, LAST, ROWS = 0.1, 4, 8, 20
"""The rate; steps; rows of an epoch, five steps of four."""


@dataclass
class Run:
    """What a run did at each step that it made."""

    rates: dict[int, float] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    draws: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    """Of the gradients that the optimizer gets."""
    updates: dict[int, set[int]] = field(default_factory=dict)
    """How many updates the optimizer's state has seen."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """Name of a changed argument -> what the resume says of it."""


class Watch(TrainerCallback):
    """Fills a `Run`."""

    def __init__(self, found: Run) -> None:
        self.found = found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        self.found.norms[state.global_step] = float(torch.stack([g.norm() for g in grads]).norm())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        states = [s for s in optimizer.state.values() if "step" in s]
        self.found.updates[state.global_step] = {int(s["step"]) for s in states}


def run(folder: Path, resume: Path | None = None, **changes: Any) -> Run:
    """A run of `LAST` steps in one process, or the rest of one."""
    result = Run()

    class Seeing(DistTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.state.global_step
            result.rows.setdefault(step, []).extend(inputs.pop("row").tolist())
            result.rates[step] = self.optimizer.param_groups[0]["lr"]
            result.draws[step] = float(torch.rand(()))
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": LAST, "save_steps": SAVED,
        "learning_rate": RATE, "optim": "adamw_torch", "max_grad_norm": 1e6, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "remove_unused_columns": False, "dist_config": {"zero_optimization": {"stage": 1}},
    }  # fmt: skip
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    g = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": x, "labels": x.roll(1), "row": torch.tensor(i)}
        for i, x in enumerate(torch.randint(0, CLASSES, (ROWS, LENGTH), generator=g))
    ]
    args = DistTrainingArguments(str(folder), **(arguments | changes))
    trainer = Seeing(model=Net("mean"), args=args, train_dataset=rows, callbacks=[Watch(result)])
    handler, logger = Lines(), logging.getLogger("hf_dist")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    result.weights = weights_of(trainer)
    for line in lines:
        if match := re.match(r"resumed with another argument: (\w+).*: .* in the checkpoint, .* now: (.*)", line):
            result.said[match[1]] = match[2]
    return result


def linear(last: int, warm: int = 0, rate: float = RATE) -> dict[int, float]:
    """The rates of HF's linear schedule."""
    return {s: rate * (s / warm if s < warm else (last - s) / (last - warm)) for s in range(SAVED, last)}


def cosine(last: int) -> dict[int, float]:
    return {s: RATE * 0.5 * (1 + math.cos(math.pi * s / last)) for s in range(SAVED, last)}


Check = Callable[[Run, Run], None]
"""`check(resumed with the change, resumed without)`."""


def rates_are(expected: dict[int, float], first: float | None = RATE / 2) -> Check:
    """`first`: what the old schedule gives; None: the same as the new one."""

    def check(found: Run, same: Run) -> None:
        assert found.rates == pytest.approx(expected | ({} if first is None else {SAVED: first}))
        assert first is None or expected[SAVED] != pytest.approx(first), "else the check sees nothing"

    return check


def nothing_changes(found: Run, same: Run) -> None:
    assert found.rates == same.rates and found.rows == same.rows and found.draws == same.draws
    assert all(torch.equal(value, same.weights[name]) for name, value in found.weights.items())


def state_is(updates: int) -> Check:
    def check(found: Run, same: Run) -> None:
        assert found.updates[SAVED] == {updates}, "updates that the state has seen after the first step"
        assert found.rates == pytest.approx(same.rates), "the schedule goes on"

    return check


def other_rows_same_draws(found: Run, same: Run) -> None:
    assert found.draws[SAVED] == same.draws[SAVED]
    assert found.rows != same.rows


def limited(found: Run, same: Run) -> None:
    assert max(found.norms.values()) <= 1e-3 * (1 + 1e-5) < min(same.norms.values())


def same_rows(found: Run, same: Run) -> None:
    assert found.rows == same.rows, "the steps have the samples that they would have had"
    assert found.rates == same.rates


def kept_in_samples(found: Run, same: Run) -> None:
    assert found.rows[SAVED] == same.rows[SAVED][:2]


BY_EPOCHS: dict[str, Any] = {"data_seed": 5, "max_steps": -1, "num_train_epochs": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str], Check]] = {
    # Name: (arguments of the first run, changes, arguments of which a line tells, check).
    "max_steps": ({}, {"max_steps": 12}, {"max_steps"}, rates_are(linear(12))),
    "fewer steps": ({}, {"max_steps": 6}, {"max_steps"}, rates_are(linear(6))),
    "num_train_epochs": (
        BY_EPOCHS, {"num_train_epochs": 3}, {"num_train_epochs"}, rates_are(linear(15), RATE * 0.6)
    ),
    "epochs beside max_steps": ({}, {"num_train_epochs": 7}, set(), nothing_changes),
    "learning_rate": ({}, {"learning_rate": 0.5}, {"learning_rate"}, nothing_changes),
    "lr_scheduler_type": (
        {}, {"lr_scheduler_type": "cosine", "max_steps": 12}, {"lr_scheduler_type", "max_steps"}, rates_are(cosine(12))
    ),
    "warmup_steps": ({}, {"warmup_steps": 6}, {"warmup_steps"}, rates_are(linear(LAST, 6))),
    "weight_decay": ({}, {"weight_decay": 0.5}, {"weight_decay"}, nothing_changes),
    "optim": ({}, {"optim": "adagrad"}, {"optim"}, state_is(1)),
    "the same class": ({}, {"optim": "adamw_torch_fused"}, {"optim"}, state_is(SAVED + 1)),
    "another class with options": (
        {}, {"optim": "adagrad", "learning_rate": 0.5, "weight_decay": 0.5},
        {"optim", "learning_rate", "weight_decay"}, rates_are(linear(LAST, rate=0.5), None),
    ),
    "another class and schedule": (
        {}, {"optim": "adagrad", "max_steps": 12}, {"optim", "max_steps"}, rates_are(linear(12))
    ),
    "seed": ({}, {"seed": 3}, {"seed"}, other_rows_same_draws),
    "seed beside data_seed": (BY_EPOCHS, {"seed": 3}, {"seed"}, nothing_changes),
    "data_seed": (BY_EPOCHS, {"data_seed": 6}, {"data_seed"}, other_rows_same_draws),
    "max_grad_norm": ({}, {"max_grad_norm": 1e-3}, {"max_grad_norm"}, limited),
    "global_batch": (
        {}, {"per_device_train_batch_size": 2}, {"global_batch", "per_device_train_batch_size"}, kept_in_samples
    ),
    "factors": (
        {}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size", "gradient_accumulation_steps"}, same_rows,
    ),
}  # fmt: skip
AT_ONCE = [
    ("num_train_epochs", "data_seed"), ("seed beside data_seed",), ("warmup_steps", "seed"), ("optim",),
    ("learning_rate", "weight_decay", "epochs beside max_steps"), ("global_batch", "max_grad_norm"),
    ("the same class", "factors"), ("another class with options",), ("lr_scheduler_type",),
]  # fmt: skip
"""Changes that one run has by default, and passes the checks of each: what they change is not the same."""


def test_every_argument_of_which_a_resume_tells_has_a_case() -> None:
    told = set().union(*(names for _, _, names, _ in CASES.values()))
    # Another number of ranks: tests/hf/test_resume_elsewhere.py.
    assert told | {"world_size"} == {*resumed_arguments._MEANING, *resumed_arguments._FACTORS}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], tuple[Path, Run]]:
    made: dict[str, tuple[Path, Run]] = {}

    def make(first: dict[str, Any]) -> tuple[Path, Run]:
        key = repr(sorted(first.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("first")
            run(folder, **first)
            checkpoint = folder / f"checkpoint-{SAVED}"
            made[key] = checkpoint, run(tmp_path_factory.mktemp("same"), checkpoint, **first)
        return made[key]

    return make


@pytest.mark.parametrize("names", [(name,) for name in CASES] if FULL_GRID else AT_ONCE, ids=" and ".join)
def test_what_a_resume_says_is_what_it_does(names: tuple[str, ...], begun: Any, tmp_path: Path) -> None:
    (first, *_), *_ = cases = [CASES[name] for name in names]
    checkpoint, same = begun(first)
    assert same.said == {}
    found = run(tmp_path, checkpoint, **functools.reduce(operator.or_, (changes for _, changes, *_ in cases), first))
    assert set(found.said) == set().union(*(told for *_, told, _ in cases)), found.said
    for *_, check in cases:
        check(found, same)
