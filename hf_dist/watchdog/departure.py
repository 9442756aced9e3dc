"""When a process leaves that cannot go on: a rank of the job has ended, and this one stands where it needs all of them.

gloo tells who waits that the connection was closed. Over NCCL nobody is told: kernels wait on the GPU, and the host in a call
of CUDA, until the timeout of the process group (`ddp_timeout`, half an hour) is over. A launcher that does not end the other
ranks waits as long.
"""

from __future__ import annotations

import time

from hf_dist.watchdog.report import Status

__all__ = ["Departure"]


class Departure:
    """What is known of ranks that have ended, and whether this one has waited for them long enough. No process needed."""

    grace = 10.0
    """Seconds at one place after a loss is known: a launcher, or gloo, may end this process in a better way before."""

    def __init__(self) -> None:
        self.reason = ""
        """Which rank ended and why; empty while none has."""
        self._since = 0.0
        self._left_well = False

    def note(self, reason: str, *, left_well: bool = False) -> bool:
        """What is known now; whether it was not known before. `left_well`: without an error, as at the end of a script."""
        if (bool(reason), left_well) == (bool(self.reason), self._left_well):
            return False
        self.reason, self._left_well, self._since = reason, left_well, time.monotonic()
        return True

    def is_due(self, status: Status, limit: float) -> bool:
        """Whether the process that says `status` of itself is to leave. `limit`: seconds of waiting that nobody reports.

        Only who waits for other ranks: one that saves or evaluates by itself comes to its end first.
        """
        if not self.reason or not status.waits:
            return False
        patience = max(self.grace, limit) if self._left_well else self.grace
        return min(status.still, time.monotonic() - self._since) >= patience
