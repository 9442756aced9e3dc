"""One job writes in a folder: a file that says who, kept fresh while the job lives, and taken over once it is dead.

A requeued or twice submitted job would write over the checkpoints of the first. The file is made by a hard link, which one of
two jobs gets on every file system, a shared one, too; no `flock`, which many shared ones do not have. Whether the other lives:
its process, where this machine can see it; else the file's time, which a living job moves on. Files only; one rank calls these.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dist.dist import excepthook, host_info
from hf_dist.errors import CheckpointError
from hf_dist.log import say

__all__ = ["OUTPUT", "claim", "holds", "is_claimed", "release", "taken_over", "writers", "writing_of"]

OUTPUT = "_hf_dist_writer.json"
"""In a run's output folder while it trains. With an underscore, because the Trainer's uploads leave such files out."""
_WRITING = ".writing-"
BEAT = 10.0
"""Seconds between two signs of life."""
_DEAD_AFTER = 3 * BEAT
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")

_held: dict[Path, str] = {}
"""Path -> the token in it, of this process."""
_beating: threading.Thread | None = None
_changed = threading.Condition()


def writing_of(final: Path) -> Path:
    """The file that says who writes the checkpoint `final`."""
    return final.parent / f"{_WRITING}{final.name}.json"


def writers(root: Path) -> list[Path]:
    """Such files beside the checkpoints of `root`."""
    return list(root.glob(f"{_WRITING}*.json"))


def claim(path: Path) -> None:
    """Take the file `path` for this process; nothing to do if it has it. Folders are made.

    Waits half a minute where only the file's time can tell whether the writer lives. Raises `CheckpointError` if it does,
    with its machine, process and start. A folder that cannot be made or written is not claimed: the save will say so.
    """
    path = Path(os.path.abspath(path))
    if holds(path):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    while not _made(path, token):
        other = _read(path)
        if other is None and path.is_symlink():
            raise CheckpointError(f"{path} is a link to nothing. Delete it.")
        if other is None:
            continue  # gone meanwhile
        if _lives(path, other):
            raise CheckpointError(_says(path, other))
        if _taken(path, other, token):
            say(f"{path}: taken over from {_who(other)}, which has ended")
            break
    if _is_of(path, token):
        _hold(path, token)


def holds(path: Path) -> bool:
    """Whether this process has claimed `path`, and no other job has taken it over since."""
    path = Path(os.path.abspath(path))
    token = _held.get(path)
    return token is not None and _is_of(path, token)


def is_claimed(path: Path) -> bool:
    """Whether another living job has claimed `path`; may take half a minute, as `claim`."""
    if holds(path):
        return False
    other = _read(path)
    return other is not None and _lives(path, other)


def taken_over(path: Path) -> str:
    """Who has taken a file of this process, because it did not move for too long; empty if nobody has."""
    path = Path(os.path.abspath(path))
    other = _read(path) if path in _held else None
    if other is None or other.get("token") == _held[path]:
        return ""
    return _says(path, other) + " It took this job for dead, because it showed no life for half a minute."


def release(path: Path) -> None:
    """Remove the file, if this process has it."""
    path = Path(os.path.abspath(path))
    if holds(path):
        with contextlib.suppress(OSError):
            path.unlink()
    with _changed:
        _held.pop(path, None)


def _release_all(_: float | None = None) -> None:
    for path in list(_held):
        release(path)


# ------------------------------------------------------------------------------------------------------------ the file


def _text(token: str) -> str:
    """Who writes, for the file."""
    job = next((f"{name} {os.environ[name]}" for name in _JOBS if os.environ.get(name)), "")
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": host_info.process_identity(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job,
        "token": token,
    }
    return json.dumps(facts) + "\n"


def _made(path: Path, token: str) -> bool:
    """Whether the file is ours now, or none can be made here; False if another has it."""
    text = _text(token)
    whole = path.with_name(f"{path.name}.{token}")
    try:
        whole.write_text(text, encoding="utf-8")
        try:
            os.link(whole, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            whole.unlink()
    return True


def _read(path: Path) -> dict[str, object] | None:
    """What the file says; {} for one that is being written or damaged; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(path: Path, other: Mapping[str, Any]) -> bool:
    """Whether the writer lives: by its process, if it is one of this machine and container; else by the file's time."""
    identity = host_info.process_identity(int(other["pid"])) if isinstance(other.get("pid"), int) else ""
    own, said = host_info.process_identity(os.getpid()), str(other.get("process", ""))
    if own and said.partition(" ")[0] == own.partition(" ")[0]:
        return identity == said
    say(f"{path}: {_who(other)} wrote here; waiting {_DEAD_AFTER:.0f} s to see whether it still does")
    first, deadline = _time_of(path), time.monotonic() + _DEAD_AFTER
    while time.monotonic() < deadline:
        time.sleep(min(1.0, BEAT / 4))
        now = _time_of(path)
        if now is None:
            return False
        if now != first:
            return True
    return False


def _time_of(path: Path) -> int | None:
    """The time of the file; opened, because a shared file system then asks its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _taken(path: Path, other: Mapping[str, object], token: str) -> bool:
    """Put a file of ours in the place of a dead job's; False if another job was faster: look again.

    Only who holds the ticket of the dead file may replace it, in one step. Two that removed it and made their own would both
    believe to have it: the slower one removes the file of the faster one. A ticket outlives its replacement only if its holder
    died, and is taken over like the file. So who makes it and still finds the dead job's file is the only one.
    """
    ticket = _ticket(path, other)
    while not _made(ticket, token):
        holder = _read(ticket)
        if holder is None or _lives(ticket, holder):
            time.sleep(0.01)
            return False
        if _taken(ticket, holder, token):
            break
    own = path.with_name(f"{path.name}.{token}")
    try:
        if not _is_of(ticket, token):
            raise OSError(f"nothing can be written in {path.parent}")
        if _read(path) != other:
            return False
        own.write_text(_text(token), encoding="utf-8")
        os.replace(own, path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: left by {_who(other)}, which has ended, and cannot be replaced: {error}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
        if _is_of(ticket, token):
            with contextlib.suppress(OSError):
                ticket.unlink()
    return True


def _is_of(path: Path, token: str) -> bool:
    """Whether the file was made with this token."""
    return (_read(path) or {}).get("token") == token


def _ticket(path: Path, other: Mapping[str, object]) -> Path:
    """The right to replace this file of `other`."""
    return path.with_name(f"{path.name}.{other.get('token', 'damaged')}.taken")


def _who(other: Mapping[str, object]) -> str:
    job = f", {other['job']}" if other.get("job") else ""
    return f"process {other.get('pid', '?')} on {other.get('host', '?')} (since {other.get('started', '?')}{job})"


def _says(path: Path, other: Mapping[str, object]) -> str:
    folder = (
        path.parent if path.name == OUTPUT else path.parent / path.name.removeprefix(_WRITING).removesuffix(".json")
    )
    return (
        f"{folder} is being written by another job, {_who(other)}; both would write over each other's checkpoints. Stop one "
        f"of them, or choose another output folder. If that job no longer exists, delete {path}."
    )


# -------------------------------------------------------------------------------------------------------- signs of life


def _hold(path: Path, token: str) -> None:
    global _beating
    with _changed:
        _held[path] = token
        if _beating is None:
            _beating = threading.Thread(target=_beat, name="hf_dist writer's sign of life", daemon=True)
            _beating.start()
            excepthook.finish_first(_release_all)


def _beat() -> None:
    global _beating
    while True:
        time.sleep(BEAT)
        with _changed:
            if not _held:
                _beating = None
                return
            for path, token in _held.items():
                if _is_of(path, token):
                    with contextlib.suppress(OSError):
                        os.utime(path)


def _forget() -> None:
    """In a forked child: the files are the parent's."""
    global _beating, _changed
    _held.clear()
    _beating, _changed = None, threading.Condition()


os.register_at_fork(after_in_child=_forget)
atexit.register(_release_all)
