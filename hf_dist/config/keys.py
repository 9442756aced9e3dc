"""Checks every key of a config against the support table: refused, without effect, misspelled, misplaced or unknown."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from hf_dist.config.findings import Findings
from hf_dist.config.rows import Status, is_off, truthy
from hf_dist.config.support import FREE_FORM, IDLE_VALUES, SUPPORT
from hf_dist.config.unknown import SECTIONS, at, judged, written_out
from hf_dist.config.values import BadValue


def check_keys(data: dict[str, Any], findings: Findings) -> None:
    """Record a problem or a note for every key of normalised `data` that is not simply used.

    Values under another name or in the wrong place are moved to the right key.
    """
    _Walk(data, findings).section(data, "")


def is_comment(key: str) -> bool:
    """Whether a key is a remark: `_comment`, `comment`, `//`, `#`."""
    return key.startswith(("_", "comment", "//", "#", "$"))


class _Walk:
    """One pass over a file. Values under wrong names are checked as values of the key that was meant."""

    def __init__(self, root: dict[str, object], findings: Findings) -> None:
        self.root = root
        self.findings = findings
        lenient = at(root, "hf_dist.strict")
        self.lenient = lenient is not None and not truthy(lenient)

    def section(self, section: Mapping[str, object], path: str) -> None:
        """Check every key of one object."""
        common = _common_reason(path)
        if ends_when_off(path) and is_off(section.get("enabled", True)):
            return
        for key, value in list(section.items()):
            self.key(path, key, value, path if common else "")

    def key(self, path: str, key: str, value: object, listed_as: str = "") -> None:
        """Check one key of the section `path`; `listed_as`: the path for the note, if it differs."""
        findings = self.findings
        where = f"{path}.{key}" if path else key
        row = SUPPORT.get(where)
        if where in SECTIONS and (where not in FREE_FORM or not isinstance(value, Mapping)):
            if isinstance(value, Mapping):
                self.section(value, where)
            elif row is None or row.status is not Status.REFUSED or not row.accepted(value):
                findings.problem(where, "is not an object", _object_example(where, value), found=value)
        elif row is None:
            if f"{path}.*" not in SUPPORT:
                self.unknown(path, key, value)
        elif row.status is Status.REFUSED and not row.accepted(value):
            findings.problem(where, row.reason, row.fix, found=value)
        elif row.status is Status.NO_EFFECT and _is_sound(where, value, findings) and not row.accepted(value):
            findings.note(listed_as or where, row.reason)

    def unknown(self, path: str, key: str, value: object) -> None:
        """Handle a key that hf_dist does not know."""
        where = f"{path}.{key}" if path else key
        if is_comment(key):
            self.findings.note(where, "a comment", "comment")
            return
        verdict = judged(key, value, path, self.root)
        if verdict is None:
            self.findings.note(where, "not a key of this schema")
        elif self.lenient:
            self.findings.note(where, f"{verdict.expected}. {verdict.fix}", "unknown")
        else:
            self.findings.problem(where, verdict.expected, verdict.fix)
            if verdict.target is not None:
                self.read_as(verdict.target, where, value)

    def read_as(self, target: str, where: str, value: object) -> None:
        """Put the value at the key that was meant, so that one run also reports what is wrong with the value."""
        *sections, name = target.split(".")
        home: object = self.root
        for part in sections:
            home = home.setdefault(part, {}) if isinstance(home, dict) else None
        if isinstance(home, dict) and name not in home:
            home[name] = value
            self.findings.written[target] = (self.findings.spelled(where), value)
            if not any(section in FREE_FORM for section in (target, ".".join(sections))):
                self.key(".".join(sections), name, value)


def ends_when_off(path: str) -> bool:
    """Whether "enabled": false ends the reading of a section: no key of it has an effect, or it is refused as a whole."""
    switch = SUPPORT.get(f"{path}.enabled")
    return bool(_common_reason(path)) or (switch is not None and switch.status is Status.REFUSED)


def _is_sound(path: str, value: object, findings: Findings) -> bool:
    """Whether a value without effect at least has a valid form; records a problem if not."""
    coerce = IDLE_VALUES.get(path)
    try:
        if coerce is not None:
            coerce(value)
    except BadValue as bad:
        findings.problem(path, bad.clause, bad.fix, found=value)
        return False
    return True


def _object_example(path: str, value: object) -> str:
    example = written_out(path, value)
    return "Remove the key." if example.endswith("{}") else f"Write {example}."


@cache
def _common_reason(path: str) -> str:
    """The reason shared by all keys of a section in which no key has an effect; empty otherwise."""
    if not path:
        return ""
    rows = [row for key, row in SUPPORT.items() if key.startswith(f"{path}.") and row.status is not Status.MAPPED]
    reasons = {row.reason if row.status is Status.NO_EFFECT else "" for row in rows}
    return reasons.pop() if len(reasons) == 1 else ""
