"""pytest-timeout's limit in seconds of a machine that has a processor for everybody (`hf_dist/dist/patience.py`)."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import pytest
import pytest_timeout

from hf_dist.dist.patience import Patience

LOOK_SECONDS = 10.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """The signal comes again and again, and fails the test when its time has passed on such a machine."""
    if settings.method != "signal":
        return None
    patience = Patience(settings.timeout)

    def look(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if patience.is_over():
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    every = min(LOOK_SECONDS, settings.timeout)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    return True
