"""Whatever the system says about a folder: one error with the path, the cause and what helps, at the start and in a save."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.checkpoint import lock, save, unwritable, weight_file
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.hf import checkpointing
from tests.hf.recipes import make_model, pad, plain_arguments, texts

NUMBERS = sorted(errno.errorcode)
"""All that a system call may return."""
ALONE = MeshAxis("alone", 1, 0, None)


def raising(number: int) -> Callable[..., Any]:
    def act(path: object, *args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return act


def is_told(text: str, number: int, path: Path) -> bool:
    """The path, the system's words or ours for them, and what helps."""
    ours = {errno.ENAMETOOLONG: "is too long"}.get(number, os.strerror(number))
    remedy = unwritable.remedy(OSError(number, "")).rstrip(".")
    return str(path) in text and ours in text and remedy in text and text.count(remedy) == 1


def test_every_error_of_the_system_is_told_with_path_cause_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "passes_user_code", lambda error: False)  # these are the system's
    for number in NUMBERS:
        check(number, tmp_path / "out", monkeypatch)


def check(number: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, in a claim, in a save; what a writer of weights has explained is not explained again."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", raising(number))
        with pytest.raises(ConfigError) as caught:
            unwritable.make_folder(str(out), "output_dir")
        assert is_told(str(caught.value), number, out), caught.value
        assert str(caught.value).startswith(f"output_dir: '{out}' cannot be made: ")
        lock.claim(out / lock.OUTPUT)
        assert not lock.holds(out / lock.OUTPUT)
        with pytest.raises(CheckpointError) as failed, save._all_or_none(ALONE, out / "checkpoint-1"):
            (out / "checkpoint-1").mkdir()
        assert is_told(str(failed.value), number, out / "checkpoint-1"), failed.value
    with pytest.raises(CheckpointError) as again, save._all_or_none(ALONE, out):
        try:
            raising(number)(out)
        except OSError as error:
            raise CheckpointError(weight_file.explain(error, out)) from error
    assert is_told(str(again.value), number, out), again.value


PLACES = {
    "file": ("file", "{root}/file is a file. Choose another folder, or move that file away."),
    "below a file": ("file/out", "{root}/file is a file. Choose another folder, or move that file away."),
    "long name": ("n" * 300, "with a name of 300, is too long. Choose shorter names: "),
    "long path": ("/".join(["n" * 200] * 25), "with a name of 200, is too long. Choose shorter names: "),
    "no disk": ("/proc/none", "No such file or directory: /proc. Choose another folder: nothing can be made there"),
}


@pytest.mark.parametrize("place", PLACES)
def test_places_where_no_folder_can_be_made(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    name, says = PLACES[place]
    with pytest.raises(ConfigError) as caught:
        unwritable.make_folder(str(tmp_path / name), "output_dir")
    assert says.format(root=tmp_path) in str(caught.value)


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_training_that_cannot_save_does_not_begin(
    saves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(checkpointing, "try_to_write", lambda folder: refused)
    arguments = DistTrainingArguments(**plain_arguments(tmp_path, 1, dist_config={}, max_steps=1, save_strategy=saves))
    trainer = DistTrainer(make_model(), arguments, train_dataset=texts(), data_collator=pad)
    if saves == "no":
        trainer.train()
        return
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be written here: Read-only file system: .* save_strategy="
    ):
        trainer.train()


def test_trying_leaves_nothing(tmp_path: Path) -> None:
    assert unwritable.try_to_write(tmp_path) is None
    assert not list(tmp_path.iterdir())
    error = unwritable.try_to_write(tmp_path / "none")
    assert error is not None and error.errno == errno.ENOENT
