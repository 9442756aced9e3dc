"""Saving that is interrupted at any moment, fails, or runs in the background: nothing is lost, nothing half-written is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_dist.checkpoint.check_names import check_needed, check_shapes
from hf_dist.checkpoint.pieces import Piece
from hf_dist.checkpoint.weight_plan import StoredTensor, WeightPlan
from hf_dist.errors import CheckpointError
from tests.checkpoint import killing, saving
from tests.covering import FULL_GRID, FULL_GRID_ONLY, some_of
from tests.harness import run_ranks
from tests.references import shared

STEPS = 5 if FULL_GRID else 3
KILLS = int(os.environ.get("HF_DIST_KILLS", "3" if FULL_GRID else "1"))
"""Jobs at stage 3, with and without a background writer; a quarter as many in each mixed layout."""


def killed(job: Any, world: int, arguments: tuple[Any, ...]) -> None:
    """Run a job one of whose ranks is killed, or is done before."""
    try:
        run_ranks(job, world, arguments, timeout=120)
    except RuntimeError as error:
        assert "ended without a result" in str(error) or "closed" in str(error) or "reset" in str(error), error


@FULL_GRID_ONLY  # a killed engine is below, a killed Trainer `hf/test_elastic.py`; `parity/test_mixed_life.py` saves and loads
@pytest.mark.parametrize("layout", killing.LAYOUTS)
def test_a_job_in_a_mixed_layout_that_is_killed_in_a_save_goes_on_as_if_it_was_not(layout: str, tmp_path: Path) -> None:
    roots = [str(tmp_path / str(seed)) for seed in range(-(-KILLS // 4))]
    for seed, root in enumerate(roots):
        killed(killing.until_killed, killing.WORLD, (root, layout, 100 * len(layout) + seed))
    jobs = (str(tmp_path / "whole"), roots, layout)
    for mine, found in run_ranks(killing.whole_and_resumed, killing.WORLD, jobs, timeout=120 + 60 * len(roots)):
        for root, (step, record) in zip(roots, found, strict=True):
            assert step >= 1, f"{root}: nothing to resume from"
            assert record["losses"] == mine["losses"] and record["norms"] == mine["norms"], root
            assert all(torch.equal(value, mine["weights"][name]) for name, value in record["weights"].items()), root
    for root in roots:
        assert not [p for p in Path(root).iterdir() if p.name.startswith(".")], root


@pytest.mark.parametrize("in_background", [False, True])
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(in_background: bool, tmp_path: Path) -> None:
    expected = shared(
        ("digests after steps", STEPS), lambda: run_ranks(saving.save_steps, 2, (str(tmp_path), STEPS))[0]
    )
    roots = []
    for seed in range(KILLS):
        root = tmp_path / str(seed)
        roots.append(str(root))
        killed(saving.save_until_killed, 2, (str(root), STEPS, 100 * in_background + seed, in_background))
    found = run_ranks(saving.load_newest, 1, (roots,), timeout=600)[0]
    for root, (step, digests) in zip(roots, found, strict=True):
        assert step >= 1, f"{root}: nothing to resume from"
        assert digests == expected[step], root
        assert not [p for p in Path(root).iterdir() if p.name.startswith(".")], root


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    for rank in run_ranks(saving.background, 2, (str(tmp_path),)):
        assert rank["events"] == ["trained", "written", "second save began", "written"]
        assert rank["stall"] < 0.7, "the stall is the copy, not the write"
        first, second = run_ranks(saving.load_newest, 1, ([str(tmp_path)],))[0], rank["after"]
        assert first == [(4, second)]
    (tmp_path / "checkpoint-4").rename(tmp_path / "later")
    assert run_ranks(saving.load_newest, 1, ([str(tmp_path)],))[0] == [(2, rank["before"])]


def test_a_failed_write_in_the_background_is_an_error_at_the_next_step(tmp_path: Path) -> None:
    results = run_ranks(saving.failing_background, 2, (str(tmp_path),))
    for rank in results:
        assert "checkpoint-2 could not be written" in rank["error"]
        assert rank["left"] == ["checkpoint-1", "checkpoint-3", "latest"]
    assert results[0]["error"] == results[1]["error"]


def test_a_full_disk_is_one_clear_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    results = run_ranks(saving.full_disk, 2, (str(tmp_path), 20_000))
    for rank in results:
        assert "checkpoint-2 could not be written" in rank["error"]
        assert rank["left"] == ["checkpoint-1", "checkpoint-3", "latest"]
    assert results[0]["error"] == results[1]["error"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = run_ranks(saving.read_only, 2, (str(tmp_path),))
    assert first == second and "could not be written (rank 0: NotADirectoryError" in first


SPOILED = {
    "lost": "norm.weight should be {",
    "renamed": "norm.weight should be ",
    "added": "norm.weight should be ",
    "cut": "norm.weight should be {",
}
SPOILED = some_of(SPOILED, "lost", "added", "cut")  # a name that is changed is lost and added


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and what was done to the file; one spawn."""
    return run_ranks(saving.other_writers, 2, (str(tmp_path_factory.mktemp("spoiled")), list(SPOILED)))


@pytest.mark.parametrize(("what", "words"), SPOILED.items())
def test_a_folder_whose_names_are_not_the_models_never_gets_its_name(
    what: str, words: str, spoiled: list[dict[str, Any]]
) -> None:
    results = [rank[what] for rank in spoiled]
    for rank in results:
        assert words in rank["error"] and "would load with random weights" in rank["error"]
        assert rank["left"] == ["checkpoint-1", "checkpoint-3", "latest"]
    assert results[0]["error"] == results[1]["error"]


def test_what_the_code_of_a_library_writes_is_compared_by_its_last_words(tmp_path: Path) -> None:
    shapes = {"0.auto_model.encoder.weight": (4, 3), "1.linear.weight": (3, 3), "1.linear.bias": (3,)}
    (tmp_path / "1_Dense").mkdir()
    save_file({"encoder.weight": torch.zeros(4, 3), "extra": torch.zeros(7)}, tmp_path / "model.safetensors")
    save_file({"linear.weight": torch.zeros(3, 3)}, tmp_path / "1_Dense" / "model.safetensors")
    torch.save({"linear.bias": torch.zeros(3)}, tmp_path / "head.bin")
    torch.save(object, tmp_path / "training_args.bin")
    check_shapes(tmp_path, shapes)
    torch.save({"linear.bias": torch.zeros(0)}, tmp_path / "head.bin")
    with pytest.raises(CheckpointError, match=r"linear.bias has shape \(0,\), 1.linear.bias of the model has \(3,\)"):
        check_shapes(tmp_path, shapes)
    (tmp_path / "head.bin").unlink()
    save_file({"encoder.weight": torch.zeros(12)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder.weight has shape \(12,\)"):
        check_shapes(tmp_path, shapes)


def test_a_parameter_without_a_place_in_the_plan_is_named() -> None:
    plan = WeightPlan.pack([StoredTensor("a", (2,), torch.float32, (Piece.whole("a", 2),))])
    check_needed(plan, {"a": (2,)})
    with pytest.raises(
        CheckpointError, match=r"b of the model has no place in its weight files \(2 parameters in all\)"
    ):
        check_needed(plan, {"a": (2,), "c": (1,), "b": (1,)})
