"""SIGTERM and SIGUSR1: all ranks agree to stop at the same microbatch, save, and leave with a code that asks for a restart."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from hf_dist import collectives
from hf_dist.mesh import MeshAxis

RESTART_CODE = 75
"""Exit code after a save on a signal: EX_TEMPFAIL of sysexits.h, "try again later"."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


_FEW_RANKS = 64
_REST_PER_RANK = 0.5e-3
"""Seconds: the question goes around a ring of all ranks, twice, at some 40 microseconds per rank."""


class StopSignal:
    """Whether some rank was told to stop. The question costs one small asynchronous all-reduce per microbatch.

    Among more than 64 ranks it rests between two questions, two seconds at 4096: for so many microbatches as rank 0 says.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._told = 0
        self._before: dict[int, Any] = {}
        self._asked: tuple[collectives.Handle, torch.Tensor] | None = None
        self._rest = 0
        """Calls that follow without a question; equal on every rank."""
        self._calls, self._since = 0, time.monotonic()

    def listen(self) -> None:
        """Take the signals over. Only a main thread can; elsewhere nothing changes."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Give the signals back. Local."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python
        self._before = {}

    def close(self) -> None:
        """Give the signals back, and finish the question under way. Every rank calls it at the same place."""
        self.release()
        self._finish()

    def leave(self) -> None:
        """Be deaf from now on. Every rank calls it at the same place.

        The first rank to end makes the launcher send SIGTERM to those that are still ending.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}
        self._finish()

    def _finish(self) -> None:
        if self._asked is not None:  # gloo aborts a process that ends in the middle of a collective
            self._asked[0].wait()
            self._asked = None

    def _note(self, number: int, _: FrameType | None) -> None:
        # Schedulers signal every process of a job, and then the launcher passes its own on: more than one is no hurry.
        self._told = number

    def agreed(self) -> int:
        """The signal that some rank had received when it asked last, equal on every rank; 0 for none.

        Every rank calls it equally often. The answer is that of the question before, so nobody waits for the network.
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
        """As rank 0 measures it; 0 on the others, which follow it."""
        if self._axis.size <= _FEW_RANKS or self._axis.rank != 0:
            return 0
        now = time.monotonic()
        calls = self._calls * _REST_PER_RANK * self._axis.size / max(now - self._since, 1e-6)
        self._calls, self._since = 0, now
        return min(int(calls), 10_000)
