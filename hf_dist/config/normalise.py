"""One spelling per key: null sections vanish, aliases and old names become the canonical ones."""

from __future__ import annotations

from typing import Any

from hf_dist.config import values
from hf_dist.config.findings import Findings
from hf_dist.config.rows import Status
from hf_dist.config.support import FREE_FORM, SECTION_ALIASES, SUPPORT


def normalised(data: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """A copy of `data` with canonical keys; `findings.written` remembers what the user wrote for each moved key."""
    result: dict[str, Any] = _without_nulls(data, "")
    for alias, target in SECTION_ALIASES.items():
        _move(result, alias, target, findings)
    _legacy_zero(result, findings)
    for alias, row in SUPPORT.items():
        if row.status is Status.MAPPED and not alias.endswith(")"):
            _move(result, alias, row.target, findings)
    return result


def _without_nulls(node: Any, path: str) -> Any:
    """null means absent everywhere except among the arguments of an optimizer or schedule."""
    if not isinstance(node, dict) or path in FREE_FORM:
        return node
    kept = {key: value for key, value in node.items() if value is not None}
    return {key: _without_nulls(value, f"{path}.{key}" if path else key) for key, value in kept.items()}


def _legacy_zero(data: dict[str, Any], findings: Findings) -> None:
    """`"zero_optimization": true` is stage 1."""
    value = data.get("zero_optimization")
    if isinstance(value, bool):
        data["zero_optimization"] = {"stage": int(value)}
        findings.written["zero_optimization.stage"] = ("zero_optimization", value)


def _move(data: dict[str, Any], alias: str, target: str, findings: Findings) -> None:
    """Move the value at `alias` to `target`; both present with different values is a problem."""
    parent = _section(data, alias)
    key = alias.rpartition(".")[2]
    if parent is None or key not in parent:
        return
    written = parent.pop(key)
    value = written
    if target.endswith(".device"):
        try:
            value = "cpu" if values.flag(written) else None
        except values.BadValue as bad:
            findings.problem(alias, bad.clause, bad.fix, found=written)
            return
        if value is None:
            return
    home = _section(data, target, create=True)
    if home is None:
        return
    name = target.rpartition(".")[2]
    if name in home:
        if home[name] != value:
            findings.problem(
                alias, f'contradicts "{target}", the newer name of the same key', f'Remove "{alias}".', written
            )
        return
    home[name] = value
    findings.written[target] = (alias, written)


def _section(data: dict[str, Any], path: str, create: bool = False) -> dict[str, Any] | None:
    """The object that holds the last key of `path`, None when it is missing or not an object."""
    node = data
    for part in path.split(".")[:-1]:
        if create:
            node.setdefault(part, {})
        child = node.get(part)
        if not isinstance(child, dict):
            return None
        node = child
    return node
