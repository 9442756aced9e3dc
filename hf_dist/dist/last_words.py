"""The last line in the log of a launched job. torchrun and `accelerate launch` print a summary or a traceback at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

__all__ = ["end_log_with", "is_launched", "outlive_launcher", "tell_launcher"]

_LIMIT = 60
"""Seconds. torchrun kills after 30 what a signal to it has not ended."""
_SPEAKER = """
import os, select, sys
launcher, next_attempt, text, limit = sys.argv[1:]
ended = select.poll()
try:
    ended.register(os.pidfd_open(int(launcher)), select.POLLIN)
    over = ended.poll(1000 * int(limit))
except ProcessLookupError:
    over = True
if over and not (next_attempt and os.path.exists(next_attempt)):
    os.write(2, os.fsencode(text) + b"\\n")
"""


def is_launched() -> bool:
    """Whether torchrun or `accelerate launch` has started this process, and writes after its end."""
    return bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def tell_launcher(message: str) -> bool:
    """Make torchrun and `accelerate launch` end their summary, the last text in the log, with `message`; False without them.

    They read one file per rank, named in this variable, in the format of torch's `ErrorHandler.record_exception`.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    try:
        with open(path, "w", encoding="utf-8") as file:
            shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": message, "extraInfo": shown}}, file)
    except OSError:
        return False
    return True


def end_log_with(message: str, *, heard: bool) -> None:
    """Make `message` the last line of a job that a signal ends. Local; each rank calls it before it exits.

    `heard`: whether the first rank of this machine got the signal: usually from the launcher, which has got it, too.
    """
    if not heard:
        tell_launcher(message)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        outlive_launcher(message)


def outlive_launcher(message: str) -> bool:
    """Have `message` printed once the launcher has ended; False where nothing can do so. Local; one rank of a machine calls it.

    For a job that a signal ends. torchrun that gets the signal itself prints its own traceback last, and reads none of the
    files of `tell_launcher` (torch 2.13, `SimpleElasticAgent.run`). So a small process of this rank waits for its end. That
    process says nothing if the launcher lives on, or starts the ranks again.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # The first process of a container takes all others with it.
    if not path or os.getppid() == 1 or not hasattr(os, "pidfd_open"):
        return False
    words = [str(os.getppid()), _next_attempt(path), message, str(_LIMIT)]
    try:
        subprocess.Popen(  # a session of its own: the launcher ends this rank's
            [sys.executable, "-I", "-S", "-c", _SPEAKER, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return False
    return True


def _next_attempt(error_file: str) -> str:
    """The folder that torchrun makes when it starts the ranks again; "" if this is no file of torchrun's."""
    found = re.fullmatch(r"(.*[/\\]attempt_)(\d+)[/\\].*", error_file)
    return f"{found[1]}{int(found[2]) + 1}" if found else ""
