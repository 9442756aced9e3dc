"""The resolved config as a plain table: every value that was set, and the keys that change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from hf_dist.config.differs import differences
from hf_dist.config.findings import Note, NoteKind
from hf_dist.config.schema import DistConfig
from hf_dist.config.values import shown

_HEADS: Mapping[NoteKind, str] = {
    "unknown": "Not keys of this file (an error unless hf_dist.strict is false):",
    "override": "Decided by the config, not by the argument:",
    "read": "Read as another type than written:",
    "idle": "Accepted without effect:",
}


def format_table(config: DistConfig) -> str:
    """Aligned lines of key, value and source for every set or changed value, then the keys without effect."""
    idle = {note.path for note in config.notes if note.kind == "idle"}
    rows = [
        (path, shown(config.value_at(path)), _source(config, path))
        for path in config.sources
        if config.spelled(path) not in idle and not _is_default(config, path)
    ]
    lines = [f"Configuration from {config.origin or 'a dict'}" + ("" if rows else ": defaults only")]
    keys = max((len(key) for key, _, _ in rows), default=0)
    width = max((len(value) for _, value, _ in rows), default=0)
    lines += [f"  {key:<{keys}}  {value:<{width}}  {source}" for key, value, source in rows]
    return "\n".join([*lines, *format_notes(config.notes), *format_differences(config)])


def format_differences(config: DistConfig) -> list[str]:
    """What DeepSpeed would do differently with this file, one line each with the key that restores it."""
    found = differences(config)
    return ["Differs from DeepSpeed:", *(f"  {each}" for each in found)] if found else []


def brief_lines(config: DistConfig) -> list[str]:
    """Where the configuration is from, and the names of keys that have no effect or differ from DeepSpeed."""
    lines = [f"from {config.origin or 'a dict'}"]
    for kind, head in _HEADS.items():
        names = [note.path for note in config.notes if note.kind == kind]
        lines += [f"{head} {', '.join(names)}"] if names else []
    differ = list(dict.fromkeys(each.path for each in differences(config)))
    return lines + ([f"differs from DeepSpeed: {', '.join(differ)}"] if differ else [])


def format_notes(notes: tuple[Note, ...]) -> list[str]:
    """One line per reason, with all keys that share it. The user's remarks are left out."""
    lines: list[str] = []
    for kind, head in _HEADS.items():
        by_reason: dict[str, list[str]] = {}
        for note in notes:
            if note.kind == kind:
                by_reason.setdefault(note.reason, []).append(note.path)
        lines += [head] if by_reason else []
        lines += [f"  {', '.join(paths)}: {reason}" for reason, paths in by_reason.items()]
    return lines


def _is_default(config: DistConfig, path: str) -> bool:
    source = config.source_of(path)
    return source == "default" or (source == "file" and config.value_at(path) == _DEFAULTS.value_at(path))


def _source(config: DistConfig, path: str) -> str:
    source = config.source_of(path)
    line = config.lines.get(config.spelled(path))
    return f"line {line}" if source == "file" and line else source


_DEFAULTS = DistConfig()
