"""One readable error per job: rank 0 reports an error that all ranks share; a rank that only lost its peers says just that.

Under torchrun or `accelerate launch`, the message ends the launcher's own summary, so it is the last text in the log.
After an error, a process exits at once (`os._exit`): jobs hang when interpreter shutdown waits for other ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from hf_dist.dist.last_words import end_log_with, is_launched, outlive_launcher, tell_launcher
from hf_dist.dist.launch import detect_launch
from hf_dist.errors import (
    CheckpointError,
    ConfigError,
    HfDistError,
    ModelError,
    OverflowAtMinimumScaleError,
    RemoteError,
    TopologyError,
)

# Raised from facts that all ranks share, so usually every rank raises the same error.
_SAME_EVERYWHERE = (ConfigError, TopologyError, ModelError, CheckpointError, OverflowAtMinimumScaleError, RemoteError)
# How gloo, NCCL and the store report that a peer is gone or has not arrived.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "Broken pipe",
    "Connection was likely closed",
)
_TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")
STOPPED = "was told to end while nothing moved"
"""Last words of a rank."""
# How the last words of a rank begin that ended because another one had.
_FOLLOWED = ("lost the connection to", "waited for")
_ROLE = "HF_DIST_ROLE"
"""The variable with the name of this process's role; `roles.py` sets it."""
_GRACE_SECONDS = 5.0
_FINISH_SECONDS = 600.0
_ASK_SECONDS, _STORE_SECONDS = 1.0, 0.5

_installed = False
_told_to_end = threading.Event()
_unfinished: list[Callable[[float], None]] = []
_listeners: list[Callable[[str], None]] = []
_explain: Callable[[], tuple[str, str]] | None = None
_ask: Callable[[str], int] | None = None


def finish_first(wait: Callable[[float], None]) -> None:
    """Register `wait(seconds)` to be called before a failing process exits, so that a running checkpoint write can finish."""
    if wait not in _unfinished:
        _unfinished.append(wait)


def on_leave(tell: Callable[[str], None]) -> None:
    """Register `tell(message)` to be called with the printed message when an error ends this process."""
    _listeners.append(tell)


def explain_with(explain: Callable[[], tuple[str, str]]) -> None:
    """Register `explain()`, called if this process lost its peers: (first failed rank and cause, its traceback or "")."""
    global _explain
    _explain = explain


def install() -> None:
    """Install the exception hook for a job of several processes, or of one under torchrun. Idempotent; else does nothing.

    Raises what `detect_launch` does, after the hook was installed.
    """
    global _installed
    if _installed:
        return
    try:
        if detect_launch().world_size < 2 and not is_launched():
            return
    except TopologyError:
        if not os.environ.get("RANK", "").isdecimal():  # then nobody knows who speaks
            raise
        sys.excepthook = _report_and_leave
        raise
    _installed = True
    sys.excepthook = _report_and_leave


def named(rank: object, word: str = "rank") -> str:
    """A rank of this process's role, with the role where the start has several. `word`: "ranks" for several. Local."""
    role = os.environ.get(_ROLE)
    return f"{role} {word} {rank}" if role else f"{word} {rank}"


def _report_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = int(os.environ.get("RANK", "0"))
    _flush_output()  # else a log file would get the last lines of training after the error
    with contextlib.suppress(ValueError):  # works only in the main thread
        # The launcher sends SIGTERM as soon as any rank ends. Print the error first.
        signal.signal(signal.SIGTERM, lambda *_: _told_to_end.set())
    if issubclass(kind, KeyboardInterrupt):
        where = traceback.extract_tb(trace)[-1:]
        place = f" at {where[0].filename}:{where[0].lineno} in {where[0].name}" if where else ""
        print_error(f"[{named(rank)}] interrupted (KeyboardInterrupt){place}")
        _leave_word("was interrupted (KeyboardInterrupt)")
        _leave(last=_words_on(error))
    elif isinstance(error, RemoteError) and error.ended:
        _report_loss(rank, f"lost the connection to {error.ended}, which ended first")
    elif isinstance(error, _SAME_EVERYWHERE):
        # Rank 0 prints, after a pause for other ranks' output; its exit makes the launcher stop the others. A rank that is
        # still alive after the grace period met the error alone (its own file is wrong, say) and must print it.
        another_ended = _told_to_end.wait(_GRACE_SECONDS if rank else 0.3)
        message = (
            f"hf_dist: {type(error).__name__}{f' on {named(rank)}' if rank or _ROLE in os.environ else ''}: {error}"
        )
        _leave_word(message)
        if not (rank and another_ended) and not tell_launcher(message):
            print_error("\n" + message)
    elif lost_peer(error):
        _report_loss(rank, "lost the connection to another rank, which ended first")
    elif timed_out(error):
        _report_loss(rank, "waited for another rank until the timeout of a process group was over (ddp_timeout)")
    else:
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        told = _told_by(rank, error)
        if told is None or told == rank:
            # At once: the launcher's summary may appear half a minute later, or never.
            _leave_word(print_traceback(error))
        else:
            print_error(
                f"[{named(rank)}] {type(error).__name__}, at the same line as on rank {told}: {_first_line(error)}"
            )
            _leave_word(text)
        tell_launcher(f"of {named(rank)}:\n{text}")
        if rank == 0:  # its end is that of the store, which the others ask
            _told_to_end.wait(_STORE_SECONDS)
    _leave()


def note_on(interrupt: KeyboardInterrupt, words: str) -> None:
    """Add what was saved, and how to go on. Shown after the traceback (Python 3.11), and last in the log of a job."""
    notes = [*getattr(interrupt, "__notes__", ()), f"hf_dist: {words}"]
    setattr(interrupt, "__notes__", notes)  # noqa: B010 - `add_note` is new in 3.11


def _words_on(interrupt: BaseException) -> str:
    error: BaseException | None = interrupt
    while error is not None:  # a second signal raises while the first one is handled
        for note in getattr(error, "__notes__", ()):
            if note.startswith("hf_dist: "):
                return str(note)
        error = error.__context__
    return "hf_dist: interrupted outside of trainer.train(). What was saved before is unchanged."


def same_error_with(ask: Callable[[str], int]) -> None:
    """Register `ask(place)`: the rank that first met an error of this place. Called when an error ends this process."""
    global _ask
    _ask = ask


def _told_by(rank: int, error: BaseException) -> int | None:
    """The rank that prints the traceback of an error that several meet at the same lines; None if nobody can say in time."""
    place = "\n".join(f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__))
    found: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the rank that has the store may be gone
            if _ask is not None:
                found.append(_ask(f"{type(error).__name__}\n{place}"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ASK_SECONDS)
    return found[0] if found else None


def _first_line(error: BaseException) -> str:
    return next(iter(words_of(error).strip().splitlines()), "")


def leave_waiting(reason: str) -> None:
    """Exit from a thread, because the main thread is blocked in a call that waits for a rank that has ended.

    `reason`: which rank, and why. Does not return.
    """
    rank = os.environ.get("RANK", "0")
    print_error(f"[{named(rank)}] waits for a rank that has ended, and leaves; {reason}")
    _leave_word("waited for a rank that had ended")
    _leave()


def leave_alone(text: str) -> None:
    """Exit from a thread, because the main thread is blocked in a call that other ranks will not make. Does not return."""
    message = f"hf_dist: OneRankError on {named(os.environ.get('RANK', '0'))}: {text}"
    _leave_word(message)
    if not tell_launcher(message):
        print_error("\n" + message)
    _leave()


def leave_stopped(message: str, code: int) -> None:
    """Exit from a thread with `code`, because the job was told to end and its main threads do not move. Does not return.

    `message`: printed; empty on all ranks but one.
    """
    if message:
        print_error(message)
        outlive_launcher(message)
    _leave_word(STOPPED)
    _leave(code, seconds=_GRACE_SECONDS)


def _leave(code: int = 1, seconds: float = _FINISH_SECONDS, last: str = "") -> None:
    """`last`: the last words in the log about an interrupt, which usually all ranks get, and their launcher."""
    _flush_output()
    for wait in reversed(_unfinished):  # as atexit does
        wait(seconds)
    if last:
        if os.environ.get("RANK", "0") == "0":
            print_error(last)
        end_log_with(last, heard=os.environ.get("LOCAL_RANK", "0") == "0")
    os._exit(code)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
                stream.flush()


def _report_loss(rank: int, what: str) -> None:
    """Report in one line that this rank lost a peer, and print the first rank's traceback if no launcher will."""
    reason, first_traceback = _explain() if _explain is not None else ("", "")
    why = reason or "its own message says why (no message at all: look for an out-of-memory kill in the kernel's log)"
    print_error(f"[{named(rank)}] {what}; {why}")
    _leave_word(what)
    _told_to_end.wait(_GRACE_SECONDS)  # the launcher blames the process that exits first
    if first_traceback and not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        print_error(first_traceback)


def _leave_word(message: str) -> None:
    for tell in _listeners:
        tell(message)


def only_followed(last_words: str | None) -> bool:
    """Whether these last words of a rank say no more than that another one had ended or did not come."""
    return last_words is not None and last_words.startswith(_FOLLOWED)


def words_of(error: BaseException) -> str:
    """The text of an exception, even of one whose `__str__` raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be made: {type(second).__name__})"


def lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    return _of_a_collective(error) and any(sign in words_of(error) for sign in _LOST_PEER)


def timed_out(error: BaseException) -> bool:
    """Whether `error` only says that another rank did not arrive within a process group's timeout."""
    return _of_a_collective(error) and any(sign in words_of(error) for sign in _TIMED_OUT)


def _of_a_collective(error: BaseException) -> bool:
    """Whether `error` was raised by a collective or a store of ranks: where, not in which words.

    A data set that reads over a network, a callback that reports to a server say "Connection reset by peer", too. gloo, NCCL
    and the stores raise `RuntimeError`s, which Python sees at the line of ours or of `torch.distributed` that waits.
    """
    if isinstance(error, HfDistError) or not isinstance(error, RuntimeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    torchs = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or __file__)
    waiting = (os.path.join(torchs, "distributed", ""), os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(waiting)


def print_traceback(error: BaseException) -> str:
    """Print the traceback on stderr, each line prefixed with the rank; returns the printed text."""
    text = "".join(traceback.format_exception(error)).rstrip()
    prefixed = "\n".join(f"[{named(os.environ.get('RANK', '0'))}] {line}" for line in text.splitlines())
    print_error(prefixed)
    return prefixed


def print_error(text: str) -> None:
    """Print on stderr at once, even inside an exception hook."""
    # Not sys.stderr: `init_process_group` wraps the hook and holds back its output until the hook returns.
    print(text, file=sys.__stderr__, flush=True)
