"""What one reading of a config found: problems and notes, with the line and the key as the user wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_dist.config.values import shown
from hf_dist.errors import ConfigError, Problem

_ABSENT = object()

NoteKind = Literal["unknown", "idle", "read", "override", "comment"]


@dataclass(frozen=True)
class Note:
    """Something the user should know about one accepted key."""

    path: str
    """JSON path as the user wrote it."""
    reason: str
    """A few words."""
    kind: NoteKind = "idle"
    """"unknown" would be an error if `hf_dist.strict` were not false, "idle" changes nothing, "read" was written as another
    type, "override" wins over an argument, "comment" is the user's remark, such as `_comment`."""


@dataclass
class Findings:
    """Collects the findings for one config. `written` maps a canonical path to the user's alias and its value."""

    origin: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    written: dict[str, tuple[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def spelled(self, path: str) -> str:
        """The path under which the user wrote the canonical `path`."""
        return respelled(path, {canonical: written for canonical, (written, _) in self.written.items()})

    def at_line(self, path: str) -> str:
        """`file:line` of the key; only the file if the line is unknown; empty for a dict."""
        return at_line(self.origin, self.lines, self.spelled(path))

    def problem(self, path: str, expected: str, fix: str = "", found: object = _ABSENT) -> None:
        """Record one wrong key. `found` is the value; omit it for keys that are wrong whatever their value.

        Without a `fix` the remedy is to write a value that `expected` names."""
        value = self.written[path][1] if path in self.written and found is not _ABSENT else found
        text = "" if value is _ABSENT else shown(value)
        fix = fix or ("Remove the key." if value is _ABSENT else "Write one, or remove the key.")
        problem = Problem(self.spelled(path), text, expected, fix, self.at_line(path))
        if problem not in self.problems:
            self.problems.append(problem)

    def note(self, path: str, reason: str, kind: NoteKind = "idle") -> None:
        """Record one accepted key, once."""
        note = Note(self.spelled(path), reason, kind)
        if note not in self.notes:
            self.notes.append(note)

    def raise_if_any(self) -> None:
        """Raise one ConfigError with every problem, in file order."""
        if self.problems:
            raise ConfigError(self.in_order())

    def in_order(self) -> list[Problem]:
        """Every problem, in file order."""
        return sorted(self.problems, key=lambda p: _line(p.file))


def respelled(path: str, spellings: Mapping[str, str]) -> str:
    """`path` with its own or the nearest enclosing section's spelling as the user wrote it."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        head = ".".join(parts[:cut])
        if head in spellings:
            return ".".join([spellings[head], *parts[cut:]])
    return path


def at_line(origin: str, lines: Mapping[str, int], path: str) -> str:
    """`file:line` of `path` or of its nearest enclosing key."""
    if not origin:
        return ""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        line = lines.get(".".join(parts[:cut]))
        if line is not None:
            return f"{origin}:{line}"
    return origin


def _line(file: str) -> int:
    tail = file.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0
