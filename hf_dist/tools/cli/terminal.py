"""Text in the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap

__all__ = ["terminal_width", "wrapped"]


def terminal_width() -> int:
    """Columns of the terminal, or `COLUMNS` of the environment; 80 where there is no terminal."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """The lines of `text`, the first after `first`, the others after `rest`. Long words such as paths stay whole."""
    lines = textwrap.TextWrapper(
        width=terminal_width(),
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.wrap(text)
