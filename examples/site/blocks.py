"""Markdown as blocks, and how many lines of a screen they take.

A screen is 40 lines of 100 columns: what a browser window of 1920 x 1080 pixels shows of a page of this site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

COLUMNS = 100
SCREEN = 40
"""Lines."""
LONGEST = 2 * SCREEN
"""Lines of a page."""
GAP = 0.7
"""Lines between two blocks."""
HEADING = {1: 2.5, 2: 2.0}
"""Level -> lines; a deeper heading takes one and a half."""
ROW = 1.3
"""Lines of a table's row that does not wrap: the text and its padding."""
PICTURE = 14
"""Lines of a drawing, most of which are wide and low."""


@dataclass(frozen=True)
class Block:
    """A heading, a fenced block ("code"), a "table", or "text": a paragraph or a list."""

    kind: str
    text: str

    @property
    def level(self) -> int:
        """Of a heading: 1 to 6; otherwise 0."""
        return len(self.text) - len(self.text.lstrip("#")) if self.kind == "heading" else 0

    @property
    def title(self) -> str:
        """Of a heading: its words."""
        return self.text.lstrip("#").strip()

    @property
    def height(self) -> float:
        """Lines on a screen, with the gap below."""
        rows = self.text.splitlines()
        if self.kind == "heading":
            return HEADING.get(self.level, 1.5)
        if self.kind == "code":
            return len(rows) - 2 + 1 + GAP
        if self.kind == "table":
            return _rows(rows) + GAP
        return sum(map(_wrapped, _paragraphs(self.text))) + GAP


def blocks(text: str) -> list[Block]:
    """The blocks of a page, without its remarks (`<!-- ... -->`)."""
    return list(_blocks(re.sub(r"^<!--.*?-->\n?", "", text, flags=re.M | re.S).splitlines()))


def height(parts: list[Block]) -> float:
    """Lines of blocks on a screen."""
    return sum(part.height for part in parts)


def joined(parts: list[Block]) -> str:
    """Blocks as a page."""
    return "\n\n".join(part.text for part in parts) + "\n"


def _blocks(lines: list[str]) -> Iterator[Block]:
    kind, held, fence = "", list[str](), ""
    for line in [*lines, ""]:
        if fence:
            held.append(line)
            if line.strip() == fence:
                yield Block("code", "\n".join(held))
                held, fence = [], ""
            continue
        now = _kind(line)
        if held and (now != kind or now in ("heading", "code", "")):
            yield Block(kind, "\n".join(held))
            held = []
        kind = now
        if now:
            held.append(line)
        if now == "code":
            fence = "```"


def _kind(line: str) -> str:
    if not line.strip():
        return ""
    if line.startswith("```"):
        return "code"
    if re.match(r"#{1,6} ", line):
        return "heading"
    return "table" if line.startswith("|") else "text"


def _paragraphs(text: str) -> list[str]:
    """Items of a list, or the one paragraph, each on one line."""
    items = list[str]()
    for line in text.splitlines():
        if re.match(r"\s*([*-]|\d+\.) ", line) or not items:
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    return items


def shown(text: str) -> str:
    """What a reader sees of inline Markdown."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "")


def _wrapped(line: str) -> float:
    return PICTURE if line.startswith("![") else ceil(len(shown(line)) / COLUMNS)


def cells(row: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def _rows(rows: list[str]) -> float:
    """Lines of a table. Where it is wider than the page, columns share the width by the length of their longest cells."""
    table = [[shown(cell) for cell in cells(row)] for row in rows if not re.fullmatch(r"[|:\s-]+", row)]
    columns = max(map(len, table))
    longest = [
        max((len(row[column]) for row in table if column < len(row)), default=1) or 1 for column in range(columns)
    ]
    words = [
        max((len(word) for row in table if column < len(row) for word in row[column].split()), default=1)
        for column in range(columns)
    ]
    room = (COLUMNS * 1.15 - 2 * columns) / max(sum(longest), 1)  # letters in tables are smaller
    widths = [max(word, length * min(room, 1)) for word, length in zip(words, longest, strict=True)]
    return sum(
        ROW - 1 + max(ceil(len(cell) / width) or 1 for cell, width in zip(row, widths, strict=False)) for row in table
    )
