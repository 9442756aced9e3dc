"""Every strategy of sampling trains each row of an epoch once, whatever the ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist import DistTrainer, DistTrainingArguments
from tests.covering import FULL_GRID
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.hf.recipes import make_model, pad

ROWS, BATCH = 24, 2
LAYOUTS: dict[str, dict[str, Any]] = {"data": {}, "tp": matrices(2), "pp": stages(2)}
STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")


def epoch(folder: Path, strategy: str, layout: dict[str, Any]) -> tuple[list[int], int]:
    """A job of `outcomes_by_world`: the rows that this rank trains, in their order, and the steps of an epoch."""
    seen: list[int] = []

    class Seeing(DistTrainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, count = super().get_batch_samples(*args, **kwargs)
            for batch in batches:
                seen.extend(batch.pop("row").tolist())
            return batches, count

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        own = torch.tensor([row["row"] for row in rows])
        batch = pad([{k: v for k, v in row.items() if k != "row"} for row in rows])
        return {**batch, "row": own}

    args = DistTrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, num_train_epochs=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, train_sampling_strategy=strategy,
        dist_config={"zero_optimization": {"stage": 1}, **layout},
    )  # fmt: skip
    data = [
        {"input_ids": torch.arange(3, 5 + i % 9), "labels": torch.arange(3, 5 + i % 9), "row": i} for i in range(ROWS)
    ]
    trainer = Seeing(make_model("llama"), args, train_dataset=data, data_collator=collate)
    trainer.train()
    return seen, trainer.state.global_step


def job(strategy: str, layout: str) -> Job:
    """Of each rank."""
    return f"{__name__}:epoch", {"strategy": strategy, "layout": LAYOUTS[layout]}


CASES = [(strategy, "data") for strategy in (STRATEGIES if FULL_GRID else STRATEGIES[-1:])]
CASES += [("batch_rebalance", "tp"), ("batch_rebalance", "pp")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [job(*case) for case in CASES]}, tmp_path_factory)


@pytest.mark.parametrize(("strategy", "layout"), CASES)
def test_each_row_of_an_epoch_is_trained_once(strategy: str, layout: str, outcomes: Any) -> None:
    (first, steps), (second, _) = found(outcomes, 2, job(strategy, layout))
    shared = layout != "data"
    assert sorted(first if shared else first + second) == list(range(ROWS))
    assert not shared or first == second
    assert steps == ROWS // (BATCH * 2 * (1 if shared else 2))
