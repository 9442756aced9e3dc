"""One logger for the package: rank 0 speaks, the others only warn."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("hf_dist")
_said: set[str] = set()


def is_speaking_rank() -> bool:
    """Whether this process prints what is said once per job (global rank 0, from the launcher's variable)."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """Log `message` at INFO on global rank 0 only; on stderr when the program set up no logging of its own."""
    if is_speaking_rank():
        if not logger.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        logger.info(message)


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
