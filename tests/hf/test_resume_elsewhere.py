"""The Trainer resumes on another number of ranks, ZeRO stage and precision, at any place of an epoch, with the same numbers."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from hf_dist.hf import resumed_arguments
from hf_dist.hf.data import SeekableBatches
from tests.checkpoint.digests import reseal
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import run_ranks
from tests.hf.on_ranks import dist_trainer, run_jobs, weights_of

LIFE = "tests.hf.lifecycle:"
WINDOW = 12
"""Samples per step: 2 per rank and microbatch; 48 rows make four steps per epoch, two epochs."""
AUTO: dict[str, Any] = {"recipe": "even", "stage": 2, "checkpoint": "auto", "gradient_accumulation_steps": 3}
"""Of the whole run, and of one that goes on."""


def run(folder: Path, world: int, *jobs: tuple[str, dict[str, Any]]) -> list[Any]:
    """What rank 0 returned for each job; a traceback in the place of a result fails the test."""
    named = [(LIFE + name, arguments) for name, arguments in jobs]
    results = run_ranks(run_jobs, world, (named, str(folder)), timeout=600)[0]
    return list(results)


def ok(result: Any) -> Any:
    """A result that is not a traceback."""
    assert not isinstance(result, str), result
    return result


def test_a_changed_factor_of_the_batch_is_told_with_what_became_of_the_batch() -> None:
    saved = {"per_device_train_batch_size": 6, "world_size": 2, "global_batch": 12, "learning_rate": 1e-3}
    same = {**saved, "per_device_train_batch_size": 12, "world_size": 1}
    assert resumed_arguments.changes(saved, same) == [
        "per_device_train_batch_size: 6 in the checkpoint, 12 now: no effect: the global batch is still 12",
        "world_size (ranks with rows of their own): 2 in the checkpoint, 1 now: no effect: the global batch is still 12",
    ]
    larger, rows = resumed_arguments.changes(saved, {**saved, "per_device_train_batch_size": 9, "global_batch": 18})
    assert larger.startswith("global_batch: 12 in the checkpoint, 18 now: an epoch has another number of steps")
    assert rows == "per_device_train_batch_size: 6 in the checkpoint, 9 now: global_batch was 12, is 18 now"


def test_batches_from_any_position_are_those_of_an_epoch_without_a_break() -> None:
    for rows, ranks, size, drops in itertools.product((1, 5, 12, 13, 17), (1, 2, 3), (1, 2), (False, True)):
        sampler: Any = BatchSampler(range(rows), size, drops)
        for rank in range(ranks):
            shard = BatchSamplerShard(sampler, ranks, rank) if ranks > 1 else sampler
            expected = list(shard)
            for start in range(1, len(expected)):
                seekable = SeekableBatches(shard)
                seekable.seek(start, None)
                assert list(seekable)[start:] == expected[start:], (rows, ranks, rank, size, drops, start)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Eight steps on 2 ranks at stage 2, with a checkpoint after each, or after every other one."""
    folder = tmp_path_factory.mktemp("whole")
    saving = {"save_strategy": "steps", "save_steps": 1 if FULL_GRID else 2}
    return folder / "0", ok(run(folder, 2, ("resumed_at", {**AUTO, **saving}))[0])


@pytest.fixture(scope="module")
def again(whole: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each of two ranks made of the checkpoints, whole and damaged, and where there are none; one spawn for all."""
    folder, sixth = tmp_path_factory.mktemp("again"), {"recipe": "even", "checkpoint": f"{whole[0]}/checkpoint-6"}
    shutil.copytree(whole[0], folder / "0")
    (folder / "0" / "checkpoint-8" / "model.safetensors").unlink()
    for n in (7, 5):
        shutil.rmtree(folder / "0" / f"checkpoint-{n}", ignore_errors=True)
    (folder / "0" / ".incomplete-checkpoint-9").mkdir()
    half = {"config": {"bf16": {"enabled": True}}}
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "auto": ("resumed_at", AUTO),  # in the folder "0"
        "another precision": ("resumed_at", {**sixth, "stage": 3, "gradient_accumulation_steps": 3, **half}),
        "another batch": ("resumed_at", {**sixth, "stage": 2, "gradient_accumulation_steps": 6}),
        "nothing": ("resume_only", {"checkpoint": True, "stage": 3}),
        "gone": ("resume_only", {"checkpoint": str(folder / "gone"), "stage": 3}),
    }
    for damage in DAMAGES:
        checkpoint = folder / f"of {damage}" / "checkpoint-4"
        shutil.copytree(whole[0] / "checkpoint-4", checkpoint)
        spoil(checkpoint, damage)
        recipe = "classifier" if damage == "another model" else "even"
        jobs[damage] = ("resume_only", {"checkpoint": str(checkpoint), "stage": 1, "recipe": recipe})
    named = [(LIFE + name, arguments) for name, arguments in jobs.values()]
    ranks = run_ranks(run_jobs, 2, (named, str(folder)), timeout=600)
    assert not (folder / "0" / ".incomplete-checkpoint-9").exists()
    return dict(zip(jobs, map(list, zip(*ranks, strict=True)), strict=True))


LAYOUTS = [(1, 3), (1, 0), (2, 3), (3, 1), (3, 3)]


@pytest.mark.parametrize(("world", "stage"), LAYOUTS if FULL_GRID else LAYOUTS[1:2])
def test_another_layout_continues_the_same_run(whole: tuple[Path, Any], world: int, stage: int, tmp_path: Path) -> None:
    folder, expected = whole
    at = (3, 4, 6) if FULL_GRID else (4,)
    changed = {"gradient_accumulation_steps": WINDOW // (2 * world)}
    jobs = [
        ("resumed_at", {"recipe": "even", "stage": stage, "checkpoint": f"{folder}/checkpoint-{n}", **changed})
        for n in at
    ]
    for step, result in zip(at, run(tmp_path, world, *jobs), strict=True):
        again = ok(result)
        assert [entry[0] for entry in again["logs"]] == list(range(1, 9)), step
        assert again["fetched"] == (8 - step) * WINDOW, "the position is sought: only what is trained on is read"
        for mine, theirs in zip(again["logs"], expected["logs"], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5), (step, mine, theirs)
        for name, weight in again["weights"].items():
            difference = (weight - expected["weights"][name]).norm() / expected["weights"][name].norm()
            assert difference < 1e-5, (step, name)


@FULL_GRID_ONLY
def test_the_rows_of_the_rest_of_the_epoch_are_the_same_ones(whole: tuple[Path, Any], tmp_path: Path) -> None:
    job = {"recipe": "even", "stage": 3, "checkpoint": f"{whole[0]}/checkpoint-6", "gradient_accumulation_steps": 6}
    again = ok(run(tmp_path, 1, ("resumed_at", job))[0])
    assert again["fetched"] == 2 * WINDOW, "the position is sought: only what is trained on is read"


def test_another_precision_continues_from_the_same_master_weights(
    whole: tuple[Path, Any], again: dict[str, list[Any]]
) -> None:
    half = ok(again["another precision"][0])
    for mine, theirs in zip(half["logs"][6:], whole[1]["logs"][6:], strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=2e-2)


def test_auto_takes_the_newest_complete_one_and_starts_fresh_without(
    whole: tuple[Path, Any], again: dict[str, list[Any]]
) -> None:
    fresh, resumed = whole[1], ok(again["auto"][0])
    assert fresh["resumed_at"] == 0 and fresh["fetched"] == 8 * WINDOW
    assert [entry[0] for entry in fresh["logs"]] == list(range(1, 9))
    assert resumed["resumed_at"] == 6
    assert resumed["logs"] == fresh["logs"]


def test_a_changed_global_batch_keeps_the_position_in_samples(again: dict[str, list[Any]]) -> None:
    larger = ok(again["another batch"][0])
    # 24 of 48 samples of the second epoch are used; 24 are left, one step of 24.
    assert larger["fetched"] == 24
    assert [entry[0] for entry in larger["logs"]] == [1, 2, 3, 4, 5, 6, 7]


DAMAGES = {
    "truncated state": ["is not complete", "bytes"],
    "missing state file": ["is not complete", "missing"],
    "newer version": ["format 99", "Upgrade"],
    "another model": ["another model"],
    "poisoned metadata": [".metadata", "has no place"],
    "another step": ["trainer_state.json", "says that 5 steps", "says 4"],
    "no trainer state": ["trainer_state.json", "cannot be read"],
    "an empty schedule": ["scheduler.pt", "cannot be read"],
    "a flipped bit": ["scheduler.pt", "not the bytes that were written", "hf-dist checkpoint verify"],
    "a trainer state of later": ["trainer_state.json", "has evil, which this transformers"],
    "a plan of nothing": ["hf_dist_weights.json", "cannot be read"],
    "a plan that leads out": ["hf_dist_weights.json", "'../x' is no file of the folder"],
    "no position": ["hf_dist.json", "its entry 'position' is no object"],
}
"""What is wrong with a checkpoint, and what the error says."""


@pytest.mark.parametrize(("damage", "parts"), DAMAGES.items())
def test_bad_checkpoints_are_one_clear_error_on_every_rank(
    damage: str, parts: list[str], again: dict[str, list[Any]]
) -> None:
    messages = again[damage]
    assert messages[0] == messages[1], "every rank must raise the same"
    assert messages[0].startswith("CheckpointError")
    for part in parts:
        assert part in messages[0]


def spoil(checkpoint: Path, damage: str) -> None:
    """Damage it."""
    state = checkpoint / "hf_dist_state"
    if damage == "truncated state":
        file = next(state.glob("__1_*.distcp"))
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "missing state file":
        next(state.glob("__1_*.distcp")).unlink()
    elif damage == "newer version":
        manifest = json.loads((checkpoint / "hf_dist.json").read_text())
        (checkpoint / "hf_dist.json").write_text(json.dumps({**manifest, "format": 99}))
    elif damage == "another step":
        text = (checkpoint / "trainer_state.json").read_text()
        assert '"global_step": 4' in text
        (checkpoint / "trainer_state.json").write_text(text.replace('"global_step": 4', '"global_step": 5'))
    elif damage in ("no trainer state", "an empty schedule"):
        file = checkpoint / ("trainer_state.json" if damage == "no trainer state" else "scheduler.pt")
        file.write_bytes(b"\0" * file.stat().st_size)
    elif damage == "a flipped bit":
        file = checkpoint / "scheduler.pt"
        file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 4]))
    elif damage == "a trainer state of later":
        file = checkpoint / "trainer_state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "evil": 1}))
    elif damage.startswith("a plan"):
        plan = {"version": 1, "files": {"../x": {}}, "indexes": {}} if damage.endswith("out") else []
        (checkpoint / "hf_dist_weights.json").write_text(json.dumps(plan))
    elif damage == "poisoned metadata":
        poison(state / ".metadata")
    if damage not in ("truncated state", "missing state file", "newer version", "a flipped bit"):
        reseal(checkpoint, **({"position": None} if damage == "no position" else {}))


def poison(metadata: Path) -> None:
    """A pickle that would run a command."""
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/hf_dist_was_here",)

    metadata.write_bytes(pickle.dumps(Evil()))


def test_nothing_to_resume_from_is_said(again: dict[str, list[Any]]) -> None:
    for what, part in (("nothing", "No valid checkpoint found in output directory"), ("gone", "gone")):
        for message in again[what]:
            assert message != "resumed" and part in message


def test_a_finished_run_that_is_started_again_changes_nothing(tmp_path: Path) -> None:
    """A job manager restarts what has ended; one more step each time would be other weights and another checkpoint."""
    found = []
    for steps in (4, 4, 4, 5) if FULL_GRID else (2, 2, 3):
        trainer = dist_trainer("plain", 1, tmp_path, max_steps=steps, save_steps=2, save_strategy="steps")
        trainer.train(resume_from_checkpoint="auto")
        files = {str(p): p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        found.append((trainer.state.global_step, weights_of(trainer), files))
    for step, weights, files in found[1:-1]:
        assert step == found[0][0] and files == found[0][2]
        assert all(torch.equal(value, found[0][1][name]) for name, value in weights.items())
    assert found[-1][0] == found[0][0] + 1, "more steps can be asked for"
