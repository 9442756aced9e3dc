"""Which checkpoint is the last one, which are removed, and what may change in one: times of writing, not numbers of steps."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint import folder
from hf_dist.checkpoint.publish import publish
from hf_dist.errors import CheckpointError

STATES = (
    "model.safetensors",
    "hf_dist_weights.json",
    "hf_dist_state/rank0.distcp",
    "hf_dist_state/common.json",
    "trainer_state.json",
)
TEXTS = (
    "README.md",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "chat_template.jinja",
)


def save(root: Path, name: str, limit: int | None = None) -> Path:
    final = root / name
    working = folder.begin(final)
    for file in (*STATES, *TEXTS):
        (working / file).parent.mkdir(parents=True, exist_ok=True)
        (working / file).write_text(f"{name}: {file}")
    folder.seal(working, {"step": int(name.rpartition("-")[2] or 0)})
    publish(working, final)
    folder.rotate(root, limit, keep=[])
    return final


def test_a_run_that_was_rolled_back_keeps_and_finds_what_it_writes(tmp_path: Path) -> None:
    for step in (4, 6, 8, 10):
        save(tmp_path, f"checkpoint-{step}")
    save(tmp_path, "checkpoint-5", limit=2)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    assert folder.newest_complete(tmp_path) == (tmp_path / "checkpoint-5", [])
    assert folder.higher(tmp_path, tmp_path / "checkpoint-5") == ["checkpoint-10"]
    save(tmp_path, "checkpoint-7", limit=2)
    assert folder.complete(tmp_path) == [tmp_path / "checkpoint-5", tmp_path / "checkpoint-7"]


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "checkpoint-8")
    monkeypatch.setattr(folder.time, "time", lambda: 1.0)
    save(tmp_path, "checkpoint-4")
    assert [p.name for p in folder.numbered(tmp_path)] == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_was_edited_or_deleted_takes_nothing_from_a_checkpoint(text: str, tmp_path: Path) -> None:
    final = save(tmp_path, "checkpoint-2")
    (final / text).write_text("edited by hand")
    assert not folder.incomplete(final) and folder.edited(final) == [text]
    (final / text).unlink()
    assert not folder.incomplete(final) and folder.edited(final) == [text]
    assert folder.newest_complete(tmp_path)[0] == final
    assert text not in folder.written(final)


@pytest.mark.parametrize("state", STATES)
def test_what_a_resume_reads_must_be_as_it_was_written(state: str, tmp_path: Path) -> None:
    final = save(tmp_path, "checkpoint-2")
    assert state in folder.written(final)
    (final / state).write_text("cut")
    assert len(folder.incomplete(final)) == 1 and not folder.edited(final)


def test_copies_links_and_folders_of_another_kind_are_a_users(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-1")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint_1")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "elsewhere")
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "elsewhere")
    for step in (2, 4, 5):
        save(tmp_path, f"checkpoint-{step}", limit=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "checkpoint-5", "checkpoint_1", "elsewhere", "latest"]
    assert (tmp_path / "elsewhere" / "config.json").exists()


CALLS = st.lists(
    st.tuples(st.sampled_from(["save", "edit", "damage", "copy", "rename", "roll back", "clean"]), st.integers(0, 9)),
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(CALLS, st.sampled_from([None, 1, 2, 3]))
def test_no_walk_loses_a_users_file_or_the_newest_state(calls: list[Any], limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        root, step, whole = Path(name), 0, list[str]()
        users: set[Path] = set()
        for number, (call, pick) in enumerate(calls):
            chosen = root / whole[pick % len(whole)] if whole else None
            if call == "save":
                step += 1
                final = save(root, f"checkpoint-{step}", limit)
                whole = [n for n in whole if (root / n).exists() and n != final.name] + [final.name]
            elif call == "roll back" and chosen is not None:
                step = int(chosen.name.rpartition("-")[2])
            elif chosen is None or not chosen.exists():
                continue
            elif call == "edit":
                (chosen / "README.md").write_text(f"note {number}" * pick)
            elif call == "damage" and len(whole) > 1:
                (chosen / STATES[0]).write_text("")
                whole.remove(chosen.name)
            elif call == "copy":
                users.add(root / f"checkpoint_{number}")
                shutil.copytree(chosen, root / f"checkpoint_{number}")
            elif call == "rename" and len(whole) > 1:
                users.add(root / f"best-{number}")
                chosen.rename(root / f"best-{number}")
                whole.remove(chosen.name)
            elif call == "clean" and len(whole) > 1:
                shutil.rmtree(chosen)
                whole.remove(chosen.name)
            assert all(path.is_dir() for path in users)
            if whole:
                newest = next(p for p in folder.numbered(root, "-") if not folder.incomplete(p))
                assert newest.name == whole[-1]


def test_a_manifest_with_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    final = save(tmp_path, "checkpoint-2")
    text = (final / folder.MANIFEST).read_text()
    (final / folder.MANIFEST).write_text(text.replace('"written": ', '"written": "x", "was": '))
    with pytest.raises(CheckpointError, match="its time is 'x'"):
        folder.read_manifest(final)
