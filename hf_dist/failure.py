"""One readable error per job: what every rank knows is said by rank 0, a rank that only lost its peers says just that.

Under torchrun or `accelerate launch` the message ends the launcher's own summary, so it is the last thing in the log.
After an error a process leaves at once (`os._exit`): waiting for the others in interpreter shutdown is how jobs hang.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from hf_dist.errors import (
    CheckpointError,
    ConfigError,
    HfDistError,
    ModelError,
    OverflowAtMinimumScaleError,
    TopologyError,
)
from hf_dist.launch import detect_launch

# Raised from facts that all ranks share, so that as a rule every rank raises the same.
_SAME_EVERYWHERE = (ConfigError, TopologyError, ModelError, CheckpointError, OverflowAtMinimumScaleError)
# How gloo, NCCL and the store report that the other side is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted", "Broken pipe")
_GRACE_SECONDS = 5.0
_FINISH_SECONDS = 600.0

_installed = False
_unfinished: list[Callable[[float], None]] = []


def finish_first(wait: Callable[[float], None]) -> None:
    """Have `wait(seconds)` called before a failing process leaves: a checkpoint that is being written is not thrown away."""
    if wait not in _unfinished:
        _unfinished.append(wait)


def install() -> None:
    """Make uncaught errors of a multi-process job readable; idempotent, and nothing changes in a single process."""
    global _installed
    if _installed or detect_launch().world_size < 2:
        return
    _installed = True
    sys.excepthook = _report_and_leave


def _report_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, _SAME_EVERYWHERE):
        # Rank 0 speaks, after what other ranks may still be printing, and its end makes the launcher stop the others. One
        # that is still alive later met the error alone (its own file is wrong, say) and must tell.
        time.sleep(_GRACE_SECONDS if rank else 0.3)
        message = f"hf_dist: {type(error).__name__}{f' on rank {rank}' if rank else ''}: {error}"
        if not _tell_launcher(message):
            _print("\n" + message)
    elif lost_peer(error):
        _print(
            f"[rank {rank}] lost the connection to another rank, which ended first; its own message says why "
            "(no message at all: look for an out-of-memory kill in the kernel's log)"
        )
        time.sleep(_GRACE_SECONDS)  # the launcher reports the process that ends first as the cause
    else:
        text = "".join(traceback.format_exception(kind, error, trace))
        _print("\n".join(f"[rank {rank}] {line}" for line in text.rstrip().splitlines()))
        _tell_launcher(f"{kind.__name__}: {error} (its traceback is above, each line begins with [rank {rank}])")
    sys.stdout.flush()
    for wait in _unfinished:
        wait(_FINISH_SECONDS)
    os._exit(1)


def _tell_launcher(message: str) -> bool:
    """Have torchrun and `accelerate launch` end their summary with `message`, the last thing in the log.

    They read a file per rank, named in this variable; its format is that of torch's `ErrorHandler.record_exception`.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
    except OSError:
        return False
    return True


def lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    return not isinstance(error, HfDistError) and any(sign in str(error) for sign in _LOST_PEER)


def _print(text: str) -> None:
    # Not sys.stderr: `init_process_group` wraps the hook and collects what it prints, to show it after the hook returns.
    print(text, file=sys.__stderr__, flush=True)
