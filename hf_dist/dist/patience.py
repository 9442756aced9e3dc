"""A time-out that lasts longer while the machine is busy: ranks need more of the clock when others use the processors, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hf_dist.dist.host_info import processors

__all__ = ["Patience"]

_MOST_CROWDED = 10.0
"""The load may be that of a host of many more processors than this container may use; a hang must end all the same."""
_STANDSTILL = 5.0
"""Seconds by the clock that one look can add: a machine that was stopped for longer was not waited for."""


class Patience:
    """`seconds` of a machine that has a processor for everybody.

    While more processes want to run than there are processors, time passes more slowly by that factor (the load average
    of the last minute). A job that waits for nothing but processors is given the same share of work on any machine; one that
    hangs is given up after at most ten times as long. Look often: `is_over`, or `until`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        """Whether the seconds have passed."""
        now = time.monotonic()
        self.spent += min(now - self._looked, _STANDSTILL) / crowding()
        self._looked = now
        return self.spent > self.seconds

    def until(self, done: Callable[[], bool], every: float = 0.05) -> bool:
        """Wait for `done()`, looking every so many seconds; False if the time passed before."""
        while not done():
            if self.is_over():
                return False
            time.sleep(every)
        return True


def crowding() -> float:
    """Processes that want to run per processor, in the last minute; at least 1, at most 10."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return min(max(1.0, os.getloadavg()[0] / processors()), _MOST_CROWDED)
