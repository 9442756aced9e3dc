"""Data without a length: a resume goes on with the next row, whatever the batch is then, and in the epoch it was in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import IterableDataset

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.checkpoint import folder
from hf_dist.hf import data_position
from tests.covering import chosen
from tests.hf.loss_kinds import CLASSES, LENGTH, Net
from tests.hf.on_ranks import Job, found, outcomes_by_world

SAVED, LAST = 4, 7
"""Steps."""


class Numbered(IterableDataset):  # type: ignore[type-arg]
    """Rows that are their own number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for i in range(self.rows):
            yield {
                "input_ids": torch.full((LENGTH,), i % CLASSES),
                "labels": torch.full((LENGTH,), i % CLASSES),
                "row": torch.tensor(i),
            }


def read(out: Path, rows: int, batch: int, accumulation: int, steps: int, resume: str | None = None) -> dict[str, Any]:
    """The rows of each step on this rank, and where a checkpoint of step `SAVED` lies."""
    seen: dict[int, list[int]] = {}

    class Seeing(DistTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(self.state.global_step, []).extend(inputs.pop("row").tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    args = DistTrainingArguments(
        str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=steps,
        save_steps=SAVED, report_to="none", use_cpu=True, disable_tqdm=True, optim="sgd", remove_unused_columns=False,
        dist_config={"zero_optimization": {"stage": 1}},
    )  # fmt: skip
    trainer = Seeing(model=Net("mean"), args=args, train_dataset=Numbered(rows))
    trainer.train(resume_from_checkpoint=resume)
    return {
        "seen": seen,
        "checkpoint": str(out / f"checkpoint-{SAVED}"),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }


def steps_from(first: int, rows: int, step: int) -> dict[int, list[int]]:
    """What one process reads from a row on: every epoch from row 0, with a short last step."""
    found: dict[int, list[int]] = {}
    for number in range(SAVED, LAST):
        found[number] = list(range(first, min(first + step, rows)))
        first = 0 if first + step >= rows else first + step
    return found


BATCHES = [(2, 2), (4, 1), (1, 1), (2, 1), (8, 1), (3, 2)]
"""Rows of a microbatch, microbatches."""
GRID = [*((rows, *b) for rows in (100, 10) for b in BATCHES), (16, 2, 1)]
CASES = chosen(GRID, lambda case: {"rows": case[0], "batch": case[1:]}, 1)


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """A run without a break over so many rows."""
    return functools.cache(lambda rows: read(tmp_path_factory.mktemp("whole"), rows, 4, 1, LAST))


@pytest.mark.parametrize(("rows", "batch", "accumulation"), CASES)
def test_goes_on_with_the_next_row(rows: int, batch: int, accumulation: int, whole_of: Any, tmp_path: Path) -> None:
    whole = whole_of(rows)
    at = {100: 16, 16: 0, 10: 4}[rows]  # inside the first epoch, at its end, inside the second
    assert {step: whole["seen"][step] for step in range(SAVED, LAST)} == steps_from(at, rows, 4)
    if rows == 10:
        assert whole["epoch"] == pytest.approx(2 + 1 / LAST), "as HF counts where it has no length"
    rest = read(tmp_path / "rest", rows, batch, accumulation, LAST, whole["checkpoint"])
    assert rest["seen"] == steps_from(at, rows, batch * accumulation)
    assert rest["step"] == LAST


def test_a_checkpoint_of_a_version_without_lanes_goes_on_too(tmp_path: Path) -> None:
    with mock.patch.object(data_position, "LANES", "unknown"):
        older = read(tmp_path / "older", 100, 4, 1, SAVED)["checkpoint"]
    assert "lanes" not in (folder.read_manifest(Path(older)) or {})["position"]
    assert read(tmp_path / "rest", 100, 4, 1, LAST, older)["seen"] == steps_from(16, 100, 4)


def resumed(out: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A job of `outcomes_by_world`."""
    return read(Path(out), *args, **kwargs)


@pytest.fixture(scope="module")
def outcomes(whole_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    checkpoint = whole_of(100)["checkpoint"]
    jobs: list[Job] = [
        (f"{__name__}:resumed", {"rows": 100, "batch": batch, "accumulation": 1, "steps": LAST, "resume": checkpoint})
        for batch in (2, 4)
    ]
    return jobs, outcomes_by_world({2: jobs}, tmp_path_factory)


@pytest.mark.parametrize("number", [0, 1], ids=["same batch", "twice the batch"])
def test_two_ranks_go_on_with_the_next_row(number: int, outcomes: Any) -> None:
    jobs, results = outcomes
    ranks = found(results, 2, jobs[number])
    both = {step: sorted(ranks[0]["seen"][step] + ranks[1]["seen"][step]) for step in ranks[0]["seen"]}
    assert both == steps_from(16, 100, 4 * (number + 1))
