"""The life of a checkpoint folder: nothing incomplete is ever taken for a checkpoint, nothing needed is deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_dist.checkpoint import folder, publish
from hf_dist.errors import CheckpointError


def make(root: Path, step: int, text: str = "weights") -> Path:
    final = root / f"checkpoint-{step}"
    working = folder.begin(final)
    (working / folder.STATE).mkdir()
    (working / "model.safetensors").write_text(text)
    (working / folder.STATE / "part").write_text("state")
    folder.seal(working, {"step": step})
    publish.publish(working, final)
    return final


def test_a_published_folder_is_complete_and_the_latest(tmp_path: Path) -> None:
    final = make(tmp_path, 5)
    assert folder.incomplete(final) == []
    assert (tmp_path / folder.LATEST).read_text() == "checkpoint-5\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-5", "latest"]
    assert folder.read_manifest(final)["step"] == 5


@pytest.mark.parametrize("damage", ["truncated", "missing", "longer", "no manifest", "half a manifest"])
def test_a_damaged_folder_is_passed_over_with_the_reason(tmp_path: Path, damage: str) -> None:
    older = make(tmp_path, 1)
    newer = make(tmp_path, 2)
    if damage == "truncated":
        (newer / "model.safetensors").write_text("wei")
    elif damage == "longer":
        (newer / "model.safetensors").write_text("weights and more")
    elif damage == "missing":
        (newer / folder.STATE / "part").unlink()
    elif damage == "no manifest":
        (newer / folder.MANIFEST).unlink()
    else:
        (newer / folder.MANIFEST).write_text('{"format": 1, "fil')
    found, skipped = folder.newest_complete(tmp_path)
    assert found == older
    assert len(skipped) == 1 and skipped[0].startswith("checkpoint-2: ")


def test_the_stock_trainers_folder_counts_when_its_last_file_is_there(tmp_path: Path) -> None:
    make(tmp_path, 1)
    stock = tmp_path / "checkpoint-7"
    stock.mkdir()
    (stock / "model.safetensors").write_text("weights")
    assert folder.newest_complete(tmp_path)[0] == tmp_path / "checkpoint-1"
    (stock / "trainer_state.json").write_text("{}")
    assert folder.newest_complete(tmp_path)[0] == stock


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    final = make(tmp_path, 3)
    manifest = json.loads((final / folder.MANIFEST).read_text())
    (final / folder.MANIFEST).write_text(json.dumps({**manifest, "format": 99, "hf_dist": "9.9"}))
    with pytest.raises(CheckpointError, match=r"hf_dist 9\.9 in format 99.*Upgrade"):
        folder.read_manifest(final)


def test_a_folder_that_is_not_complete_is_not_published(tmp_path: Path) -> None:
    final = make(tmp_path, 3, "old")
    working = folder.begin(final)
    (working / "model.safetensors").write_text("weights")
    folder.seal(working, {})
    (working / "model.safetensors").write_text("wei")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 3 bytes, 7 were written"):
        publish.publish(working, final)
    assert (final / "model.safetensors").read_text() == "old"


def test_publishing_again_replaces_the_old_one(tmp_path: Path) -> None:
    make(tmp_path, 3, "old")
    assert (make(tmp_path, 3, "new") / "model.safetensors").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "latest"]


def test_recovery_after_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    final = make(tmp_path, 3)
    final.rename(tmp_path / ".replaced-checkpoint-3")
    (tmp_path / ".incomplete-checkpoint-3").mkdir()
    publish.recover(tmp_path)
    assert folder.newest_complete(tmp_path)[0] == final
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "latest"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100, 101):  # whatever the number of digits
        make(tmp_path, step)
    assert folder.newest_complete(tmp_path)[0] == tmp_path / "checkpoint-101"
    folder.rotate(tmp_path, 2, keep=[tmp_path / "checkpoint-9"])
    assert [p.name for p in folder.numbered(tmp_path)] == ["checkpoint-101", "checkpoint-9"]
    folder.rotate(tmp_path, 1, keep=[])
    assert [p.name for p in folder.numbered(tmp_path)] == ["checkpoint-101"]


def test_rotation_never_deletes_the_only_complete_one(tmp_path: Path) -> None:
    only = make(tmp_path, 1)
    for step in (2, 3):
        (make(tmp_path, step) / "model.safetensors").unlink()
    folder.rotate(tmp_path, 1, keep=[])
    assert folder.newest_complete(tmp_path)[0] == only


def test_no_limit_deletes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    assert folder.rotate(tmp_path, None, keep=[]) == []
    assert len(folder.numbered(tmp_path)) == 3
