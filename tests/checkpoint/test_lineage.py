"""Which checkpoint is the last one, which are removed, and what may change in one: times of writing, not numbers of steps."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint import folder, lock
from hf_dist.checkpoint.publish import publish, recover
from hf_dist.errors import CheckpointError
from tests.checkpoint.test_publish import Killed, killed_at
from tests.covering import FULL_GRID

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


WALKS = 300 if FULL_GRID else 60
ACTS = (
    "save",
    "edit",
    "damage",
    "copy",
    "copy as a number",
    "rename",
    "roll back",
    "clean",
    "kill",
    "second job",
    "resume",
    "limit",
)
CALLS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9)), max_size=16)


class Run:
    """A run's folder as a user and several jobs treat it."""

    def __init__(self, root: Path) -> None:
        self.root, self.step, self.limit = root, 0, 2
        self.whole: list[str] = []
        """Names of the run's own complete checkpoints, the last written at the end."""
        self.users: dict[Path, str] = {}
        """Files that the user made -> what is in them."""

    def act(self, call: str, pick: int, number: int) -> None:
        """One of `ACTS`."""
        chosen = self.root / self.whole[pick % len(self.whole)] if self.whole else None
        if call == "limit":
            self.limit = pick
        elif call == "save":
            self.step += 1
            save(self.root, f"checkpoint-{self.step}", self.limit)
            self._saved(f"checkpoint-{self.step}")
        elif call == "kill":
            self._killed(pick)
        elif call == "resume":
            recover(self.root)
            newest, _ = folder.newest_complete(self.root)
            self.step = self.step if newest is None else int((folder.read_manifest(newest) or {})["step"])
        elif call == "second job":
            self._second_job(pick)
        elif chosen is not None and chosen.exists():
            getattr(self, f"_{call.replace(' ', '_')}")(chosen, number)

    def _saved(self, name: str) -> None:
        self.whole = [n for n in self.whole if (self.root / n).exists() and n != name] + [name]

    def _killed(self, pick: int) -> None:
        """In the middle of a save; the next start cleans up."""
        name = f"checkpoint-{self.step + 1}"
        with killed_at(pick), suppress(Killed):
            save(self.root, name, self.limit)
            self.step += 1
        recover(self.root)
        if (self.root / name).is_dir() and not folder.incomplete(self.root / name):
            self._saved(name)
            self.step = int(name.rpartition("-")[2])
        self.whole = [n for n in self.whole if (self.root / n).exists()]

    def _second_job(self, pick: int) -> None:
        """It comes while the first one writes, cleans up, and leaves."""
        final = self.root / f"checkpoint-{self.step + 1}"
        lock.claim(lock.writing_of(final))
        working = folder.begin(final)
        (working / "half").write_text("")
        held = dict(lock._held)
        lock._held.clear()  # as in another process of this machine
        try:
            recover(self.root)
            assert (working / "half").exists()
        finally:
            lock._held.update(held)
            lock.release(lock.writing_of(final))
            shutil.rmtree(working)

    def _edit(self, chosen: Path, number: int) -> None:
        (chosen / "README.md").write_text(f"note {number}" * (number % 3))

    def _damage(self, chosen: Path, number: int) -> None:
        if len(self.whole) > 1:
            (chosen / STATES[0]).write_text("")
            self.whole.remove(chosen.name)

    def _copy(self, chosen: Path, number: int) -> None:
        shutil.copytree(chosen, self.root / f"checkpoint_{number}")
        self._keep(self.root / f"checkpoint_{number}")

    def _copy_as_a_number(self, chosen: Path, number: int) -> None:
        shutil.copytree(chosen, self.root / f"checkpoint-{1000 + number}")
        self._keep(self.root / f"checkpoint-{1000 + number}")

    def _rename(self, chosen: Path, number: int) -> None:
        if len(self.whole) > 1:
            chosen.rename(self.root / f"best-{number}")
            self._keep(self.root / f"best-{number}")
            self.whole.remove(chosen.name)

    def _roll_back(self, chosen: Path, number: int) -> None:
        self.step = int(chosen.name.rpartition("-")[2])

    def _clean(self, chosen: Path, number: int) -> None:
        if len(self.whole) > 1:
            shutil.rmtree(chosen)
            self.whole.remove(chosen.name)

    def _keep(self, made: Path) -> None:
        self.users |= {path: path.read_text() for path in made.rglob("*") if path.is_file()}

    def check(self) -> None:
        """Nothing of the user's is lost, and the newest state of the run is found (itself, or a copy of it)."""
        for path, text in self.users.items():
            assert path.read_text() == text
        if self.whole:
            newest, _ = folder.newest_complete(self.root)
            assert newest is not None
            assert folder.written_at(newest) >= folder.written_at(self.root / self.whole[-1])


@settings(max_examples=WALKS, deadline=None)
@given(CALLS)
def test_no_walk_loses_a_users_file_or_the_newest_state(calls: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        for number, (call, pick) in enumerate(calls):
            run.act(call, pick, number)
            run.check()


def test_a_manifest_with_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    final = save(tmp_path, "checkpoint-2")
    text = (final / folder.MANIFEST).read_text()
    (final / folder.MANIFEST).write_text(text.replace('"written": ', '"written": "x", "was": '))
    with pytest.raises(CheckpointError, match="its time is 'x'"):
        folder.read_manifest(final)
