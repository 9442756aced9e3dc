"""One readable error per job: what every rank knows is said by rank 0, a rank that only lost its peers says just that.

Under torchrun or `accelerate launch` the message ends the launcher's own summary, so it is the last thing in the log.
After an error a process leaves at once (`os._exit`): waiting for the others in interpreter shutdown is how jobs hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
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
# How gloo, NCCL and the store report that the other side is gone, or does not come.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted", "Broken pipe")
_TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")
_GRACE_SECONDS = 5.0
_FINISH_SECONDS = 600.0

_installed = False
_told_to_end = threading.Event()
_unfinished: list[Callable[[float], None]] = []
_listeners: list[Callable[[str], None]] = []
_explain: Callable[[], tuple[str, str]] | None = None


def finish_first(wait: Callable[[float], None]) -> None:
    """Have `wait(seconds)` called before a failing process leaves: a checkpoint that is being written is not thrown away."""
    if wait not in _unfinished:
        _unfinished.append(wait)


def on_leave(tell: Callable[[str], None]) -> None:
    """Have `tell(message)` called when an error ends this process, with what it prints."""
    _listeners.append(tell)


def explain_with(explain: Callable[[], tuple[str, str]]) -> None:
    """Have a process that lost its peers ask `explain()` who was first and why, and for that rank's traceback or ""."""
    global _explain
    _explain = explain


def install() -> None:
    """Make uncaught errors of a multi-process job readable; idempotent, and nothing changes in a single process."""
    global _installed
    if _installed or detect_launch().world_size < 2:
        return
    _installed = True
    sys.excepthook = _report_and_leave


def _report_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = int(os.environ.get("RANK", "0"))
    _flush_output()  # a log that is not a terminal would else get the last lines of training after what is said here
    with contextlib.suppress(ValueError):  # only a main thread can
        # The launcher sends it as soon as any rank has ended; what is to be said here is said first.
        signal.signal(signal.SIGTERM, lambda *_: _told_to_end.set())
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, _SAME_EVERYWHERE):
        # Rank 0 speaks, after what other ranks may still be printing, and its end makes the launcher stop the others. One
        # that is still alive later met the error alone (its own file is wrong, say) and must tell.
        another_ended = _told_to_end.wait(_GRACE_SECONDS if rank else 0.3)
        message = f"hf_dist: {type(error).__name__}{f' on rank {rank}' if rank else ''}: {error}"
        _leave_word(message)
        if not (rank and another_ended) and not _tell_launcher(message):
            print_error("\n" + message)
    elif lost_peer(error):
        _report_loss(rank, "lost the connection to another rank, which ended first")
    elif timed_out(error):
        _report_loss(rank, "waited for another rank until the timeout of a process group was over (ddp_timeout)")
    else:
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        _leave_word(print_traceback(error))  # at once: the launcher's summary may come half a minute later, or never
        _tell_launcher(f"of rank {rank}:\n{text}")
    _leave()


def leave_waiting(reason: str) -> None:
    """End this process from a thread: its main thread waits for a rank that has ended, in a call that does not return.

    `reason`: which rank, and why. Does not return.
    """
    rank = os.environ.get("RANK", "0")
    print_error(f"[rank {rank}] waits for a rank that has ended, and leaves; {reason}")
    _leave_word("it waited for a rank that had ended")
    _leave()


def leave_alone(text: str) -> None:
    """End this process from a thread: its main thread waits, in a call that does not return, for ranks that will not come."""
    message = f"hf_dist: OneRankError on rank {os.environ.get('RANK', '0')}: {text}"
    _leave_word(message)
    if not _tell_launcher(message):
        print_error("\n" + message)
    _leave()


def _leave() -> None:
    _flush_output()
    for wait in _unfinished:
        wait(_FINISH_SECONDS)
    os._exit(1)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()


def _report_loss(rank: int, what: str) -> None:
    """Of a process that is here still: one line, unless nobody else shows what the first one had to say."""
    reason, first_traceback = _explain() if _explain is not None else ("", "")
    why = reason or "its own message says why (no message at all: look for an out-of-memory kill in the kernel's log)"
    print_error(f"[rank {rank}] {what}; {why}")
    _leave_word(f"it {what}")
    _told_to_end.wait(_GRACE_SECONDS)  # the launcher reports the process that ends first as the cause
    if first_traceback and not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        print_error(first_traceback)


def _leave_word(message: str) -> None:
    for tell in _listeners:
        tell(message)


def _tell_launcher(message: str) -> bool:
    """Have torchrun and `accelerate launch` end their summary with `message`, the last thing in the log.

    They read a file per rank, named in this variable; its format is that of torch's `ErrorHandler.record_exception`.
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


def lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    return not isinstance(error, HfDistError) and any(sign in str(error) for sign in _LOST_PEER)


def timed_out(error: BaseException) -> bool:
    """Whether `error` only says that another rank did not come within a process group's timeout."""
    return not isinstance(error, HfDistError) and any(sign in str(error) for sign in _TIMED_OUT)


def print_traceback(error: BaseException) -> str:
    """On stderr, with the rank before each line; returns what it printed."""
    text = "".join(traceback.format_exception(error)).rstrip()
    prefixed = "\n".join(f"[rank {os.environ.get('RANK', '0')}] {line}" for line in text.splitlines())
    print_error(prefixed)
    return prefixed


def print_error(text: str) -> None:
    """On stderr, at once, also inside a hook."""
    # Not sys.stderr: `init_process_group` wraps the hook and collects what it prints, to show it after the hook returns.
    print(text, file=sys.__stderr__, flush=True)
