"""The Trainer on a stream, on other numbers of ranks, with workers, stopped within a window: rows of each step and weights."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from typer.testing import CliRunner

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.checkpoint import folder
from hf_dist.tools.cli import app
from tests.covering import FULL_GRID
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world, weights_of
from tests.hf.recipes import make_model

LANES, STEP, LAST, SAVED = 12, 12, 9, 4
"""Lanes; rows of a step; steps of a run, of which the fourth is saved. An epoch has 75 rows, so seven steps, the last short."""


def rows_of(shards: list[int]) -> Any:
    """Of each shard another number of rows."""
    for shard in shards:
        for row in range(4 + shard % 5):
            tokens = [(shard * 7 + row * 3 + i) % 50 + 3 for i in range(6)]
            yield {"input_ids": tokens, "labels": tokens, "row": shard * 100 + row}


def stream(kind: str) -> Any:
    """13 shards."""
    data = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(13))})
    return data.shuffle(seed=1, buffer_size=5) if kind == "shuffled" else data


def train(
    out: Path, kind: str, batch: int, accumulation: int, workers: int = 0, resume: str | None = None,
    stop: int = -1, config: dict[str, Any] | None = None, collator: Any = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The rows of each step on this rank, and the weights. `stop`: the microbatch of the run in which it gets SIGTERM."""
    seen: dict[int, list[int]] = {}
    calls = [0]

    class Seeing(DistTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = inputs.pop("row").tolist()
            if inputs["labels"].ne(-100).any():
                seen.setdefault(self.state.global_step, []).extend(rows)
            if calls[0] == stop and self.accelerator.process_index == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            calls[0] += 1
            return super().training_step(model, inputs, *args, **kwargs)

    args = DistTrainingArguments(
        str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=LAST,
        save_steps=SAVED, report_to="none", use_cpu=True, disable_tqdm=True, optim="sgd", learning_rate=0.3,
        remove_unused_columns=False, dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0,
        lr_scheduler_type="constant",
        dist_config=config or {"zero_optimization": {"stage": 1}, "hf_dist": {"data_lanes": LANES, "log_rows": True}},
        **more,
    )  # fmt: skip
    trainer = Seeing(
        model=make_model("llama"), args=args, train_dataset=stream(kind), data_collator=collator or collated
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit:
        return {"seen": seen, "stopped": True, "run": str(out)}
    return {"seen": seen, "weights": weights_of(trainer), "run": str(out), "epoch": trainer.state.epoch}


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one length."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def by_step(ranks: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The rows of each step over all ranks."""
    steps = sorted(set().union(*(rank["seen"] for rank in ranks)))
    return {step: sorted(row for rank in ranks for row in rank["seen"].get(step, [])) for step in steps}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    made: dict[str, Any] = {}

    def run(kind: str) -> dict[str, Any]:
        if kind not in made:
            made[kind] = train(tmp_path_factory.mktemp(kind.replace(" ", "")), kind, 4, 3)
        return made[kind]

    return run


def test_rows_of_one_process(whole: Any) -> None:
    run = whole("plain")
    steps = by_step([run])
    assert [len(steps[step]) for step in range(LAST)] == [12, 12, 12, 12, 12, 12, 3, 12, 12]
    first = [row for step in range(7) for row in steps[step]]
    assert sorted(first) == sorted(row["row"] for row in rows_of(list(range(13)))), "each row once in an epoch"
    lines = [json.loads(line) for line in (Path(run["run"]) / "hf_dist_rows.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    assert [sum(b - a for a, b in line["lanes"].values()) for line in lines] == [len(steps[s]) for s in range(LAST)]


def test_the_rows_that_a_checkpoint_has_seen_are_told(whole: Any) -> None:
    checkpoint = f"{whole('plain')['run']}/checkpoint-{SAVED}"
    done = CliRunner().invoke(app, ["checkpoint", "data", checkpoint, "--json"])
    assert done.exit_code == 0, done.output
    seen = json.loads(done.output)
    assert (seen["step"], seen["epoch"], seen["rows"]) == (SAVED, 0, SAVED * STEP)
    assert seen["lanes"] == [SAVED * STEP // LANES] * LANES
    done = CliRunner().invoke(app, ["checkpoint", "data", checkpoint])
    assert "step 4, epoch 0 (from 0), 48 rows of it seen" in done.output
    assert "lane    1             4 rows, of the shards 1, 13, ..." in done.output


ONE = [("plain", 2, 6, 0), ("shuffled", 12, 1, 2)] if FULL_GRID else [("shuffled", 6, 2, 2)]


@pytest.mark.parametrize(("kind", "batch", "accumulation", "workers"), ONE)
def test_one_process_goes_on_with_another_microbatch(
    kind: str, batch: int, accumulation: int, workers: int, whole: Any, tmp_path: Path
) -> None:
    run = whole(kind)
    checkpoint = f"{run['run']}/checkpoint-{SAVED}"
    rest = train(tmp_path, kind, batch, accumulation, workers, checkpoint)
    expected = by_step([run])
    assert by_step([rest]) == {step: expected[step] for step in range(SAVED, LAST)}
    for name, value in rest["weights"].items():
        torch.testing.assert_close(value, run["weights"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [4, 6] if FULL_GRID else [4])
def test_a_run_that_is_told_to_stop_within_a_window_makes_the_window_again(
    stop: int, whole: Any, tmp_path: Path
) -> None:
    expected = by_step([whole("shuffled")])
    begun = train(tmp_path, "shuffled", 4, 3, stop=stop)
    assert begun["stopped"]
    saved = max(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    assert saved < SAVED
    rest = train(tmp_path, "shuffled", 3, 4, resume="auto")
    assert by_step([rest]) == {step: expected[step] for step in range(saved, LAST)}


class Packing:
    """A collator that keeps one row for the next batch."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows, self.kept = [*self.kept, *rows[:-1]], rows[-1:]
        return collated(rows)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def test_a_collator_goes_on_with_the_rest_that_it_has_kept(tmp_path: Path) -> None:
    run = train(tmp_path / "whole", "plain", 4, 3, collator=Packing())
    checkpoint = f"{run['run']}/checkpoint-{SAVED}"
    rest = train(tmp_path / "rest", "plain", 4, 3, resume=checkpoint, collator=Packing())
    assert rest["seen"] == {step: run["seen"][step] for step in range(SAVED, LAST)}
    collators = (folder.read_manifest(Path(checkpoint)) or {})["position"]["lanes"]["collators"]
    assert collators == 1, "data ranks: others are refused, as each has a rest"


def resumed(out: Path, **kwargs: Any) -> dict[str, Any]:
    """A job of `outcomes_by_world`. Its ranks are daemons, which may have no workers otherwise."""
    vars(multiprocessing.current_process())["_config"].pop("daemon", None)
    result = train(Path(out), **kwargs)
    gc.collect()  # else the end of this process tells the workers to stop, which they put off
    return result


def layout(keys: dict[str, Any]) -> dict[str, Any]:
    """A config with these keys."""
    return {"zero_optimization": {"stage": 1}, "hf_dist": {"data_lanes": LANES}, **keys}


def jobs_of(run: str) -> dict[int, list[Job]]:
    """By number of ranks."""
    name, checkpoint = f"{__name__}:resumed", f"{run}/checkpoint-{SAVED}"
    base: dict[str, Any] = {"kind": "shuffled", "resume": checkpoint, "batch": 2, "accumulation": 3}
    by_first = {"accelerator_config": {"dispatch_batches": True}}
    return {
        2: [
            (name, base | {"workers": 2, "dataloader_multiprocessing_context": "fork"}),
            (name, base | {"batch": 6, "accumulation": 1} | by_first),
            (name, base | {"batch": 4, "config": layout(matrices(2))}),
            (name, base | {"batch": 4, "config": layout(stages(2))}),
        ],
        3: [(name, base | {"batch": 1, "accumulation": 4})],
    }


@pytest.fixture(scope="module")
def outcomes(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = jobs_of(whole("shuffled")["run"])
    return jobs, outcomes_by_world(jobs, tmp_path_factory)


@pytest.mark.parametrize(
    ("world", "number"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0)], ids=["workers", "by first", "tp", "pp", "three"]
)
def test_other_ranks_go_on_with_the_same_rows(world: int, number: int, outcomes: Any, whole: Any) -> None:
    jobs, results = outcomes
    ranks = found(results, world, jobs[world][number])
    run = whole("shuffled")
    expected = by_step([run])
    if "config" in jobs[world][number][1]:  # ranks that share rows
        assert ranks[0]["seen"] == ranks[1]["seen"]
        ranks = ranks[:1]
    assert by_step(ranks) == {step: expected[step] for step in range(SAVED, LAST)}
    for name, value in ranks[0]["weights"].items():
        torch.testing.assert_close(value, run["weights"][name], rtol=0, atol=1e-6)
