"""SIGTERM and SIGUSR1: all ranks agree to stop at the same microbatch, save, and exit with a code that requests a restart.

A job that hangs reaches no next microbatch: the watchdog hears of SIGTERM, too, and ends a job that has not moved since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from hf_dist.dist import collectives, watchdog
from hf_dist.dist.last_words import end_log_with
from hf_dist.dist.mesh import MeshAxis

RESTART_CODE = watchdog.STOPPED
"""Exit code after a save on a signal."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


_FEW_RANKS = 64
_REST_PER_RANK = 0.5e-3
"""Seconds. The all-reduce passes all ranks of a ring twice, at about 40 microseconds per rank."""


class StopSignal:
    """Checks whether any rank received a stop signal, with one small asynchronous all-reduce per microbatch.

    With more than 64 ranks it pauses between checks (two seconds at 4096 ranks); rank 0 sets the number of microbatches.
    """

    def __init__(self, axis: MeshAxis, last: Callable[[], str] = str) -> None:
        """`last()`: the name of the newest checkpoint, "" for none; for the words of a job that hangs. From any thread."""
        self._axis = axis
        self.last = last
        self._told = 0
        self._ear: tuple[socket.socket, socket.socket] | None = None
        self._heard = False
        self._before: dict[int, Any] = {}
        self._asked: tuple[collectives.Handle, torch.Tensor] | None = None
        self._rest = 0
        """Number of following calls that skip the check; equal on every rank."""
        self._calls, self._since = 0, time.monotonic()

    def listen(self) -> None:
        """Install the signal handlers. Only possible in the main thread; elsewhere nothing changes."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        # A handler runs between two lines of Python. A main thread that waits in native code comes to none; this is written.
        ears = socket.socketpair()
        for ear in ears:
            ear.setblocking(False)
        other = signal.set_wakeup_fd(ears[1].fileno(), warn_on_full_buffer=False)
        if other != -1:  # an event loop's
            signal.set_wakeup_fd(other)
        else:
            self._ear = ears
        _listening.add(self)
        watchdog.obey(self)

    def heard_to_end(self) -> bool:
        """Whether this process has received SIGTERM, even if its main thread has not come to it. From any thread."""
        if self._ear is not None:
            with contextlib.suppress(OSError):
                self._heard |= signal.SIGTERM in self._ear[0].recv(4096)
        return self._heard or self._told == signal.SIGTERM

    def release(self) -> None:
        """Restore the previous signal handlers. Local."""
        _listening.discard(self)
        self._close_ear()
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the handler was not set from Python
        self._before = {}

    def close(self) -> None:
        """Restore the signal handlers and finish the pending check. Every rank calls it at the same place."""
        self.release()
        self._finish()

    def leave(self, message: str) -> None:
        """Ignore further signals, finish the pending check, end the log with `message`. Every rank calls it at the same place.

        When the first rank exits, the launcher sends SIGTERM to the ranks that are still exiting.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}
        self._close_ear()
        self._finish()
        place = (socket.gethostname(), int(os.environ.get("LOCAL_RANK", "0")))
        here = [
            (local, heard)
            for (host, local), heard in collectives.all_gather_object(self._axis, (place, self._told != 0))
            if host == place[0]
        ]
        end_log_with(message, heard=min(here)[1])

    def _close_ear(self) -> None:
        if self._ear is not None:
            signal.set_wakeup_fd(-1)
            for ear in self._ear:
                ear.close()
            self._ear = None

    def _finish(self) -> None:
        if self._asked is not None:  # gloo aborts a process that exits during a collective
            self._asked[0].wait()
            self._asked = None

    def _note(self, number: int, _: FrameType | None) -> None:
        # Schedulers signal every process of a job, and the launcher forwards its own signal: repeats do not mean urgency.
        self._told = number

    def agreed(self) -> int:
        """The signal that some rank had received at the last check, equal on every rank; 0 for none.

        Every rank calls it equally often. It returns the result of the previous check, so nobody waits for the network.
        """
        self._calls += 1
        if self._rest > 0:
            self._rest -= 1
            return 0
        answer = 0
        if self._asked is not None:
            handle, heard = self._asked
            handle.wait()
            answer, self._rest = (int(number) for number in heard.tolist())
        heard = torch.tensor([float(self._told), float(self._calls_to_rest())])
        self._asked = (collectives.all_reduce(self._axis, heard, op="max"), heard)
        return answer

    def _calls_to_rest(self) -> int:
        """Measured by rank 0; 0 on the other ranks, which follow rank 0."""
        if self._axis.size <= _FEW_RANKS or self._axis.rank != 0:
            return 0
        now = time.monotonic()
        calls = self._calls * _REST_PER_RANK * self._axis.size / max(now - self._since, 1e-6)
        self._calls, self._since = 0, now
        return min(int(calls), 10_000)


_listening: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def _release_in_child() -> None:
    """A pool of processes ends its own by SIGTERM: they must end, and the parent must not hear of it."""
    for stop in list(_listening):
        stop.release()


os.register_at_fork(after_in_child=_release_in_child)
