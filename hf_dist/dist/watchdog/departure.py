"""Decides when a process must exit because a rank of the job has ended and this process waits for all ranks.

gloo reports a closed connection to a waiting rank. NCCL does not: kernels wait on the GPU, and the host in a CUDA call, until
the process group's timeout (`ddp_timeout`, half an hour). A launcher that does not end the other ranks waits as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hf_dist.dist.watchdog.report import Status

__all__ = ["Departure", "Told"]


class Told(Protocol):
    """What hears the signals of this process."""

    last: Callable[[], str]
    """The name of the newest checkpoint, or ""."""

    def heard_to_end(self) -> bool:
        """Whether SIGTERM has come."""


class Departure:
    """Records which rank has ended, and decides whether this rank has waited long enough. Pure bookkeeping."""

    grace = 10.0
    """Seconds to wait after a loss is known: a launcher or gloo may end this process in a better way first."""

    def __init__(self) -> None:
        self.reason = ""
        """Which rank ended and why; empty if none has."""
        self._since = 0.0
        self._left_well = False

    def note(self, reason: str, *, left_well: bool = False) -> bool:
        """Record the current knowledge; returns whether it is new. `left_well`: the rank ended without an error."""
        if (bool(reason), left_well) == (bool(self.reason), self._left_well):
            return False
        self.reason, self._left_well, self._since = reason, left_well, time.monotonic()
        return True

    def is_due(self, status: Status, limit: float) -> bool:
        """Whether the process with this `status` must exit. `limit`: seconds of waiting that count as normal.

        True only for a process that waits for other ranks; one that saves or evaluates by itself may finish first.
        """
        if not self.reason or not status.waits:
            return False
        patience = max(self.grace, limit) if self._left_well else self.grace
        return min(status.still, time.monotonic() - self._since) >= patience
