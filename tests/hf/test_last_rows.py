"""Evaluation counts each row once where HF and accelerate do not know how many are new: split batches, and streams."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.hf.evaluation import CountedRows
from tests.covering import FULL_GRID
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.hf.recipes import make_model, pad, texts

SIZES = (3, 5, 6, 7) if FULL_GRID else (5, 6)
"""Rows of a set, in batches of two."""


class Number(nn.Module):
    """The loss is the mean of its rows."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.factor * x).mean(), "logits": x}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def arguments(folder: Path, layout: dict[str, Any], **more: Any) -> DistTrainingArguments:
    """For an evaluation."""
    return DistTrainingArguments(
        str(folder), per_device_eval_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, dist_config={"zero_optimization": {"stage": 1}, **layout}, **more,
    )  # fmt: skip


def split(folder: Path, dispatch: bool) -> list[tuple[float, int]]:
    """Loss and number of predictions for sets of rows 0, 1, 2, ..., by size."""
    args = arguments(folder, {}, accelerator_config={"split_batches": True, "dispatch_batches": dispatch or None})
    results = []
    for size in SIZES:
        rows = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([0.0])} for i in range(size)]
        trainer = DistTrainer(Number(), args, eval_dataset=rows, compute_metrics=lambda p: {"n": len(p.label_ids)})
        found = trainer.evaluate()
        results.append((found["eval_loss"], found["eval_n"]))
    return results


def streams(folder: Path, layout: dict[str, Any]) -> list[tuple[float, int]]:
    """The same for streams and for lists of texts, in turn."""
    args = arguments(folder, layout, per_device_train_batch_size=2, max_steps=1, save_strategy="no")
    trainer = DistTrainer(
        make_model("llama"), args, train_dataset=texts(8), data_collator=pad,
        compute_metrics=lambda p: {"n": len(p.label_ids)},
    )  # fmt: skip
    results = []
    for size in SIZES:
        # As many labels in each row: else the mean of a batch depends on which rows are in it.
        rows = [{**row, "labels": row["input_ids"].clone()} for row in texts(size, ragged=False)]
        for data in (Stream(rows), rows):
            found = trainer.evaluate(data)
            results.append((found["eval_loss"], found["eval_n"]))
    return results


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of different lengths, filled up with zeros, which count in the mean."""
    longest = max(len(row["x"]) for row in rows)
    filled = [torch.cat([row["x"], torch.zeros(longest - len(row["x"]))]) for row in rows]
    return {"x": torch.stack(filled), "labels": torch.stack([row["labels"] for row in rows])}


def ragged(folder: Path) -> list[tuple[float, float]]:
    """Loss of rows of which the first is the longest, and how far the inputs in metrics by batch are from the predictions."""
    args = arguments(folder, {}, batch_eval_metrics=True, include_for_metrics=["inputs"])
    results = []
    for size in SIZES:
        rows = [{"x": torch.arange(1.0, 9.0 - i), "labels": torch.tensor([0.0])} for i in range(size)]
        off: list[float] = []

        def by_batch(p: Any, compute_result: bool, off: list[float] = off) -> dict[str, float]:
            inputs, logits = p.inputs["x"], torch.as_tensor(p.predictions)
            if inputs.shape[0] != logits.shape[0]:
                off.append(1.0)
            else:
                width = min(inputs.shape[1], logits.shape[1])
                off.append(float((inputs - logits)[:, :width].clamp(min=-50).abs().max()))
            return {"off": max(off)} if compute_result else {}

        trainer = DistTrainer(Number(), args, eval_dataset=rows, data_collator=padded, compute_metrics=by_batch)
        found = trainer.evaluate()
        results.append((found["eval_loss"], found["eval_off"]))
    return results


class Sized(Stream):
    """Rows in order that have a length."""

    def __len__(self) -> int:
        return len(self.rows)


def test_counting_hides_nothing_of_a_stream() -> None:
    sized, plain = CountedRows(Sized([1, 2, 3])), CountedRows(Stream([1, 2]))
    assert len(sized) == 3 and list(plain) == [1, 2] and plain.count == 2
    with pytest.raises(TypeError, match="no len"):
        len(plain)
    again = pickle.loads(pickle.dumps(sized))
    assert list(again) == [1, 2, 3] and sized.count == 0 and not hasattr(again, "set_epoch")


def job(name: str, **arguments: Any) -> Job:
    """Of each rank."""
    return f"{__name__}:{name}", arguments


RAGGED = job("ragged")
SPLIT = {dispatch: job("split", dispatch=dispatch) for dispatch in (False, True)}
STREAMS = {
    ("data", 2): job("streams", layout={}),
    ("tp", 2): job("streams", layout=matrices(2)),
    ("pp and data", 4): job("streams", layout=stages(2)),
}
JOBS = {
    world: [job for (_, size), job in STREAMS.items() if size == world]
    + ([*SPLIT.values(), RAGGED] if world == 2 else [])
    for world in (2, 4)
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world(JOBS, tmp_path_factory)


@pytest.mark.parametrize("dispatch", SPLIT)
def test_batches_that_all_ranks_share(dispatch: bool, outcomes: Any) -> None:
    for rank in found(outcomes, 2, SPLIT[dispatch]):
        assert rank == [(pytest.approx(sum(range(size)) / size), size) for size in SIZES]


def test_new_rows_are_not_padded_to_repeated_ones_and_metrics_by_batch_have_the_inputs_of_all(
    outcomes: Any, tmp_path: Path
) -> None:
    wanted = ragged(tmp_path)
    assert [off for _, off in wanted] == [0.0] * len(SIZES)
    for rank in found(outcomes, 2, RAGGED):
        assert rank == [(pytest.approx(loss), 0.0) for loss, _ in wanted]


@pytest.mark.parametrize("layout", STREAMS, ids=lambda layout: layout[0])
def test_a_stream_gives_what_its_rows_give(layout: tuple[str, int], outcomes: Any) -> None:
    for rank in found(outcomes, layout[1], STREAMS[layout]):
        for stream, rows, size in zip(rank[::2], rank[1::2], SIZES, strict=True):
            assert stream == (pytest.approx(rows[0], rel=1e-6), size) and rows[1] == size
