"""`hf-dist watch` runs a command once for each complete checkpoint, oldest first, and goes on where it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from hf_dist.checkpoint import folder, publish
from hf_dist.dist.patience import Patience
from hf_dist.errors import CheckpointError
from hf_dist.tools.cli.watch import RECORD, watch

SCRIPT = """
import json, os, pathlib, sys
place = pathlib.Path(sys.argv[1])
step = int((place / "weights").read_text())
with open(sys.argv[2], "a") as log:
    log.write(f"{step}\\n")
if step == int(os.environ.get("FAILS_AT", -1)):
    sys.exit(3)
if step == int(os.environ.get("SLOW_AT", -1)):
    import time; time.sleep(60)
print("loading")
print(json.dumps({"loss": step / 2, "asked": os.environ["HF_DIST_CHECKPOINT"].rpartition("/")[2]}))
"""


def save(root: Path, step: int, name: str = "") -> Path:
    """A complete checkpoint of ours."""
    final = root / (name or f"checkpoint-{step}")
    working = folder.begin(final)
    (working / "weights").write_text(str(step))
    folder.seal(working, {"step": step})
    publish.publish(working, final)
    return final


def command(tmp_path: Path) -> list[str]:
    """The script, which writes what it was asked."""
    script = tmp_path / "evaluate.py"
    script.write_text(SCRIPT)
    return [sys.executable, "-S", str(script), "{}", str(tmp_path / "asked")]


def asked(tmp_path: Path) -> list[int]:
    """Steps in the order of the script's starts."""
    path = tmp_path / "asked"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def lines(root: Path) -> list[dict[str, object]]:
    """The record."""
    return [json.loads(line) for line in (root / RECORD).read_text().splitlines()]


def run(root: Path, words: Sequence[str], attempts: int = 2) -> None:
    """Until nothing is left."""
    watch(root, list(words), poll=0.05, idle=0.0, attempts=attempts)


def test_each_complete_checkpoint_once_and_oldest_first(tmp_path: Path) -> None:
    root, words = tmp_path / "out", command(tmp_path)
    for step, name in ((20, ""), (5, ""), (7, "epoch=1.ckpt")):
        save(root, step, name)
    folder.begin(root / "checkpoint-30")  # being written
    (root / "checkpoint-40").mkdir()  # of somebody else, unfinished
    (root / "checkpoint-6").mkdir()
    (root / "checkpoint-6" / "trainer_state.json").write_text("{}")  # of the stock Trainer
    (root / "checkpoint-6" / "weights").write_text("6")
    damaged = save(root, 8)
    (damaged / "weights").write_text("")
    run(root, words)
    assert asked(tmp_path) == [5, 6, 7, 20]
    assert [line["metrics"] for line in lines(root)][2] == {"loss": 3.5, "asked": "epoch=1.ckpt"}
    save(root, 30)
    run(root, words)
    assert asked(tmp_path) == [5, 6, 7, 20, 30], "those before are not evaluated again"
    assert not list(root.glob(".watched-*"))


def test_a_command_that_fails_is_tried_again_and_then_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS_AT", "1")
    root, words = tmp_path / "out", command(tmp_path)
    save(root, 1)
    save(root, 2)
    with pytest.raises(typer.Exit) as end:
        run(root, words)
    assert end.value.exit_code == 1
    assert "1 evaluated, 1 failed: checkpoint-1" in capsys.readouterr().out.splitlines()[-1]
    assert asked(tmp_path) == [1, 1, 2]
    assert [(line["checkpoint"], line["exit"]) for line in lines(root)] == [
        ("checkpoint-1", 3),
        ("checkpoint-1", 3),
        ("checkpoint-2", 0),
    ]


def test_numbers_that_json_does_not_have_are_written_as_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "out"
    save(root, 1)
    run(root, [sys.executable, "-S", "-c", 'print(\'{"loss": NaN, "of": [Infinity, 1.5], "x": {"y": -Infinity}}\')'])
    (line,) = lines(root)
    assert line["metrics"] == {"loss": "nan", "of": ["inf", 1.5], "x": {"y": "-inf"}}
    assert "NaN" not in (root / RECORD).read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "no new checkpoint for 0 s; 1 evaluated"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_while_it_evaluates_it_goes_on_with_the_same_one(number: signal.Signals, tmp_path: Path) -> None:
    root, words = tmp_path / "out", command(tmp_path)
    first = save(root, 1)
    save(root, 2)
    code = "from hf_dist.tools.cli import app; app()"
    options = ["watch", "--poll", "0.05", str(root), "--", *words]
    started = subprocess.Popen([sys.executable, "-c", code, *options], env={**os.environ, "SLOW_AT": "2"})
    assert Patience(60).until(lambda: asked(tmp_path) == [1, 2])
    folder.remove(root / "checkpoint-2")  # rotated away while it is evaluated: the links keep it
    held = root / ".watched-checkpoint-2"
    assert (held / "weights").read_text() == "2"
    with pytest.raises(CheckpointError, match="watched by another process"):
        run(root, words)
    started.send_signal(number)
    started.wait(20)
    assert [line["checkpoint"] for line in lines(root)] == ["checkpoint-1"]
    save(root, 2)
    with (root / RECORD).open("a") as record:
        record.write('{"checkpoint": "checkpo')  # a line that was not finished
    run(root, words)
    assert asked(tmp_path) == [1, 2, 2] and first.is_dir() and not held.exists()
    assert [line["checkpoint"] for line in lines(root)] == ["checkpoint-1", "checkpoint-2"]


def test_a_folder_that_does_not_exist_is_waited_for_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "out-of-run", 1)
    with pytest.raises(CheckpointError, match="out-of-rum does not exist, after 0 s"):
        watch(tmp_path / "out-of-rum", ["true"], poll=0.05, idle=0.0)
    said = capsys.readouterr().out
    assert (
        "out-of-rum does not exist: waiting for the run that makes it (did you mean" in said and "out-of-run?" in said
    )
    assert not (tmp_path / "out-of-rum").exists()


def test_a_folder_without_a_checkpoint_says_that_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    watch(tmp_path / "out", ["true"], poll=0.05, idle=0.1)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'out'}: 0 evaluated, waiting for the next complete checkpoint"
