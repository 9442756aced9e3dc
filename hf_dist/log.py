"""One logger for the package: rank 0 speaks, the others only warn."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

logger = logging.getLogger("hf_dist")
_said: set[str] = set()


class _Stderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is now, like Python's own handler of last resort."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(message)s"))
        self.level_before = logging.NOTSET
        """That of the logger, when this was added to it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr


_own = _Stderr()


def is_speaking_rank() -> bool:
    """Whether this process prints what is said once per job (global rank 0, from the launcher's variable)."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """Log `message` at INFO on global rank 0 only; on stderr when the program set up no logging of its own."""
    if is_speaking_rank():
        _settle_handler()
        logger.info(message)


def _settle_handler() -> None:
    """A handler of our own as long as the program has none; with both, every line would be there twice.

    A level that the program gave this logger stays: `logging.getLogger("hf_dist").setLevel(logging.WARNING)` is silence.
    """
    if logging.getLogger().handlers:
        if _own in logger.handlers:  # the program has set up its logging since
            logger.removeHandler(_own)
            logger.setLevel(_own.level_before)
    elif not logger.handlers:
        _own.level_before = logger.level
        logger.addHandler(_own)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def say_once(message: str) -> None:
    """Like `say`, but a text already said by this process is not repeated."""
    if message not in _said:
        _said.add(message)
        say(message)


def warn_once(message: str) -> None:
    """Log `message` as a warning on global rank 0, once per process."""
    if message not in _said:
        _said.add(message)
        if is_speaking_rank():
            logger.warning(message)
