"""The launcher's settings and the file: settings fill what the file leaves open, and must agree with the rest."""

from __future__ import annotations

from typing import Any

from hf_dist.config.accelerate import LauncherSettings, put
from hf_dist.config.findings import Findings
from hf_dist.config.values import is_auto, shown

_ABSENT = object()


def take_launcher(data: dict[str, Any], launcher: LauncherSettings | None, findings: Findings) -> dict[str, str]:
    """Write the launcher's values into normalised `data`. Returns the source of each filled key."""
    filled: dict[str, str] = {}
    for path, setting in launcher.settings.items() if launcher is not None else ():
        value = _value_at(data, path)
        if value is _ABSENT or is_auto(value):
            filled[path] = f"launcher <- {setting.origin}"
            put(data, path, setting.value)
        elif not _same(value, setting.value):
            expected = f"differs from {setting.origin}={shown(setting.value)}, which accelerate's configuration set"
            line = findings.lines.get(findings.spelled(path))
            where = f" on line {line}" if line else ""
            fix = f'Set it to "auto"{where}, or delete "{setting.key}" from the configuration of accelerate.'
            findings.problem(path, expected, fix, found=value)
    return filled


def _value_at(data: dict[str, object], path: str) -> object:
    node: object = data
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _same(written: Any, value: object) -> bool:
    """Whether two JSON values are equal, also if numbers and words are written as text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(written) == value
        except (TypeError, ValueError):
            return False
    return bool(written == value) or str(written).lower() == str(value).lower()
