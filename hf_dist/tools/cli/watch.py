"""`hf-dist watch`: a second job that evaluates each new checkpoint of a run with the user's command.

The record is a file beside the checkpoints, with one line per finished evaluation. After a crash, a restart continues with
the checkpoints that have no line. The training run is not contacted: a checkpoint gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

import typer

from hf_dist.errors import CheckpointError
from hf_dist.tools.cli.written import to_write

__all__ = ["watch"]

RECORD = "hf_dist_watch.jsonl"
_HELD = ".watched-"
_PLACE = "{}"

Output = Annotated[
    Path,
    typer.Argument(
        help="The folder that a run writes its checkpoints into.", show_default=False, callback=to_write("folder")
    ),
]
Command = Annotated[
    list[str],
    typer.Argument(help="The command, after `--`; {} is the checkpoint, otherwise it is appended.", show_default=False),
]
Poll = Annotated[float, typer.Option(help="Seconds between two checks.", min=0.05)]
Idle = Annotated[float | None, typer.Option(help="Exit after this many seconds without a new checkpoint.", min=0.0)]
Attempts = Annotated[int, typer.Option(help="How often to try a failing command for one checkpoint.", min=1)]


def watch(output: Output, command: Command, poll: Poll = 30.0, idle: Idle = None, attempts: Attempts = 2) -> None:
    """Run a command for each complete checkpoint of a folder, oldest first. Its last output line is recorded if it is JSON.

    Nothing is lost if it is interrupted or killed: started again, it continues. Hard links hold a checkpoint during its
    evaluation, so that `save_total_limit` does not delete it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    since = time.monotonic()
    _wait_for(output, since, poll, idle)
    with _record(output / RECORD) as record:
        for left in output.glob(f"{_HELD}*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        has_said = False
        while True:
            done, failed = _tries(output / RECORD, attempts)
            found = _next(output, done | failed)
            if found is not None:
                _evaluate(found, command, record)
                since = time.monotonic()
            elif idle is not None and time.monotonic() - since >= idle:
                _say_the_end(idle, done, failed)
                return
            else:
                if not has_said:
                    print(f"{output}: {len(done)} evaluated, waiting for the next complete checkpoint", flush=True)
                has_said = True
                time.sleep(poll)


def _wait_for(output: Path, since: float, poll: float, idle: float | None) -> None:
    """Until the run has made its folder. A name that is misspelt is told at once, and never made."""
    if output.is_dir():
        return
    parent = output.absolute().parent
    near = difflib.get_close_matches(
        output.name, [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    )
    hint = f" (did you mean {parent / near[0]}?)" if near else ""
    print(f"{output} does not exist: waiting for the run that makes it{hint}", flush=True)
    while not output.is_dir():
        if idle is not None and time.monotonic() - since >= idle:
            raise CheckpointError(
                f"{output} does not exist, after {idle:.0f} s. Name the output folder of a run{hint}."
            )
        time.sleep(poll)


@contextlib.contextmanager
def _record(path: Path) -> Iterator[IO[str]]:
    """The record, opened to append a line. Only one process at a time can open it."""
    import fcntl

    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{path.parent} is watched by another process. Stop it, or let it run.") from error
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):  # killed in the middle of a line
            os.ftruncate(file.fileno(), len(text[: text.rfind("\n") + 1].encode()))
        yield file


def _tries(path: Path, attempts: int) -> tuple[set[str], set[str]]:
    """Names of checkpoints that were evaluated, and of those whose command has failed as often as it may."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    done = {line["checkpoint"] for line in lines if line["exit"] == 0}
    failed = [line["checkpoint"] for line in lines if line["exit"] != 0]
    return done, {n for n in failed if failed.count(n) >= attempts} - done


def _say_the_end(idle: float, done: set[str], failed: set[str]) -> None:
    """Exits with 1 where a checkpoint has no evaluation."""
    names = f", {len(failed)} failed: {', '.join(sorted(failed))}" if failed else ""
    print(f"no new checkpoint for {idle:.0f} s; {len(done)} evaluated{names}", flush=True)
    if failed:
        raise typer.Exit(1)


def _next(output: Path, done: set[str]) -> Path | None:
    from hf_dist.checkpoint import folder

    return next((path for path in folder.complete(output) if path.name not in done), None)


def _evaluate(checkpoint: Path, command: Sequence[str], record: IO[str]) -> None:
    """Run the command for one checkpoint, and write its line afterwards."""
    held = _hold(checkpoint)
    if held is None:
        return  # the run has deleted it meanwhile
    place = str(held)
    words = [word.replace(_PLACE, place) for word in command]
    if not any(_PLACE in word for word in command):
        words.append(place)
    started, last = time.time(), ""
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=_environment(checkpoint))
        try:
            assert process.stdout is not None
            for text in process.stdout:
                print(text, end="", flush=True)
                last = text if text.strip() else last
            code = process.wait()
        except BaseException:  # told to stop: the next start repeats this evaluation
            process.terminate()
            process.wait()
            raise
    finally:
        if held != checkpoint:
            shutil.rmtree(held, ignore_errors=True)
    line = {
        "checkpoint": checkpoint.name,
        "exit": code,
        "seconds": round(time.time() - started, 3),
        "metrics": _metrics(last) if code == 0 else None,
    }
    record.write(json.dumps(line, allow_nan=False) + "\n")
    record.flush()
    os.fsync(record.fileno())
    print(
        f"{checkpoint.name}: " + (f"failed with exit code {code}" if code else json.dumps(line["metrics"])), flush=True
    )


def _environment(checkpoint: Path) -> Mapping[str, str]:
    return {**os.environ, "HF_DIST_CHECKPOINT": str(checkpoint)}


def _hold(checkpoint: Path) -> Path | None:
    """A folder of hard links, which no rotation deletes. Without hard links the checkpoint itself; None if it is gone."""
    held = checkpoint.parent / f"{_HELD}{checkpoint.name}"
    try:
        shutil.copytree(checkpoint, held, copy_function=os.link)
    except (shutil.Error, OSError):
        shutil.rmtree(held, ignore_errors=True)
        return checkpoint if checkpoint.is_dir() else None
    return held


def _metrics(line: str) -> object:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return _for_json(found) if isinstance(found, dict) else None


def _for_json(value: object) -> object:
    """Numbers that JSON does not have as texts, such as "nan", which `float` reads."""
    if isinstance(value, dict):
        return {key: _for_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_for_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
