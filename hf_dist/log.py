"""The package's logger. Only global rank 0 logs."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

logger = logging.getLogger("hf_dist")
_said: set[str] = set()


class _Stderr(logging.StreamHandler):
    """Writes to the current `sys.stderr`, like Python's own handler of last resort."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(message)s"))
        self.level_before = logging.NOTSET
        """The logger's level when this handler was added."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr


_own = _Stderr()


def is_speaking_rank() -> bool:
    """Whether this process prints once-per-job messages: global rank 0, according to the launcher's variable."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """Log `message` at INFO on global rank 0 only; to stderr if the program has not set up logging."""
    if is_speaking_rank():
        _settle_handler()
        logger.info(message)


def _settle_handler() -> None:
    """Use our own handler only while the program has none: with both, every line would appear twice.

    A level that the program set on this logger stays: `logging.getLogger("hf_dist").setLevel(logging.WARNING)` silences it.
    """
    if logging.getLogger().handlers:
        if _own in logger.handlers:  # the program has set up logging in the meantime
            logger.removeHandler(_own)
            logger.setLevel(_own.level_before)
    elif not logger.handlers:
        _own.level_before = logger.level
        logger.addHandler(_own)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def say_once(message: str) -> None:
    """Like `say`, but each text only once per process."""
    if message not in _said:
        _said.add(message)
        say(message)


def warn_once(message: str) -> None:
    """Log `message` as a warning on global rank 0, once per process."""
    if message not in _said:
        _said.add(message)
        if is_speaking_rank():
            logger.warning(message)
