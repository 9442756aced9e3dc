"""The package's logger. Only global rank 0 logs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

logger = logging.getLogger("hf_dist")
_said: set[str] = set()
_followed: int | None = None
"""The level that `follow_level` has set."""


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
        say_here(message)


def say_here(message: str) -> None:
    """Like `say`, on whichever rank calls it."""
    _settle_handler()
    with _progress_bars_aside():
        logger.info(message)


def warn(message: str) -> None:
    """Log `message` as a warning, on whichever rank calls it."""
    with _progress_bars_aside():
        logger.warning(message)


def follow_level(level: int) -> None:
    """Print what is at least as important as `level`, of the `logging` module, unless the program has set a level itself."""
    global _followed
    if logger.level in (logging.NOTSET, _followed) or _own in logger.handlers:
        logger.setLevel(level)
        _followed = level


@contextmanager
def _progress_bars_aside() -> Iterator[None]:
    """Inside, a line may be written to the terminal: bars of tqdm are taken away before and drawn again below it.

    That is what `tqdm.write` does; this one holds for any handler, also one of the program.
    """
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is None:
        yield
    else:
        with tqdm.tqdm.external_write_mode(file=sys.stderr):
            yield


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
            warn(message)
