"""Saves into folders that hold more than checkpoints: what we have not written stays, whatever the order, and after a kill."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint import publish as publishing
from hf_dist.checkpoint.folder import MANIFEST, begin, incomplete, seal
from hf_dist.checkpoint.publish import finish, is_ours, publish, recover

NAMES = ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "hf_dist_state/a/0", "hf_dist_state/b")
THEIRS = ("data.csv", "src/train.py", "hf_dist_state/notes.txt", "config.json.bak")


class Killed(BaseException):
    """At some operation on files."""


@contextmanager
def killed_at(count: int) -> Iterator[None]:
    """Raise instead of the `count`-th rename or deletion."""
    left = [count]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "rename"), (os, "replace"), (Path, "unlink"), (publishing.shutil, "rmtree")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def save(final: Path, names: list[str], content: str, kill: int = -1) -> None:
    working = begin(final)
    for name in names:
        (working / name).parent.mkdir(parents=True, exist_ok=True)
        (working / name).write_text(content + name)
    seal(working, {})
    with killed_at(kill), suppress(Killed):
        publish(working, final)


def files(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


saves = st.tuples(st.just("save"), st.lists(st.sampled_from(NAMES), min_size=1, unique=True), st.integers(-1, 12))
theirs = st.tuples(st.just("write"), st.sampled_from(THEIRS), st.just(0))
WALKS = st.lists(st.one_of(saves, theirs, st.just(("recover", "", 0))), max_size=8)


@settings(max_examples=80, deadline=None)
@given(WALKS, st.booleans())
def test_nothing_of_the_users_is_lost_and_no_mixture_of_saves_is_taken_for_one(walk: list[Any], links: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        final, user, last = Path(root, "work"), {}, 0
        if links:
            Path(root, "elsewhere").mkdir()
            final.symlink_to(Path(root, "elsewhere"))
        for number, (call, what, kill) in enumerate([*walk, ("recover", "", 0)]):
            if call == "write":
                path = final / what
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(user.setdefault(what, f"user {number}"))
            elif call == "save":
                save(final, what, f"save {number} ", kill)
                last = number
            else:
                recover(Path(root))
                finish(final)
            found = files(final) if final.exists() else {}
            if call == "recover" or kill < 0:
                assert {name: found.get(name) for name in user} == user
            if final.is_dir() and (final / MANIFEST).is_file():
                assert not incomplete(final)
                written = json.loads((final / MANIFEST).read_text())["files"]
                assert len({found[name].rpartition(" ")[0] for name in written}) == 1, "files of two saves"
                if call == "save" and kill < 0:
                    assert set(written) == set(what) and set(found) == set(what) | set(user)
                    assert {found[name].rpartition(" ")[0] for name in what} == {f"save {last}"}
        assert not [name for name in os.listdir(root) if name.startswith(".")]


def test_the_folder_in_which_a_process_works_is_not_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "work", ["config.json"], "one ")
    monkeypatch.chdir(tmp_path / "work")
    assert not is_ours(tmp_path / "work")
    save(Path.cwd(), ["model.safetensors"], "two ")
    assert files(Path.cwd()) == {"model.safetensors": "two model.safetensors"} == files(tmp_path / "work")


def test_a_folder_of_saves_alone_is_swapped_in_one_rename(tmp_path: Path) -> None:
    save(tmp_path / "work", ["config.json", "hf_dist_state/b"], "one ")
    assert is_ours(tmp_path / "work")
    inode = (tmp_path / "work").stat().st_ino
    save(tmp_path / "work", ["config.json"], "two ")
    assert (tmp_path / "work").stat().st_ino != inode and files(tmp_path / "work") == {"config.json": "two config.json"}
