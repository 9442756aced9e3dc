"""One spelling per key: null sections are dropped, and aliases and old names become the canonical ones."""

from __future__ import annotations

from typing import Any

from hf_dist.config import values
from hf_dist.config.findings import Findings
from hf_dist.config.rows import Status, is_off, truthy
from hf_dist.config.support import FREE_FORM, SECTION_ALIASES, SUPPORT
from hf_dist.config.unknown import known_keys

_WRAPPERS = frozenset({"deepspeed", "deepspeed_config", "ds_config", "deepspeed_params", "config"})
_HOW = "schedule_config"
SWITCHED = ("elasticity", "curriculum_learning", "flops_profiler", "progressive_layer_drop")
_TELLING = frozenset({"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"})
"""Names that no other program uses for its sections."""


def normalised(data: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """A copy of `data` with canonical keys. `findings.written` records what the user wrote for each moved key."""
    result: dict[str, Any] = _unwrapped(_without_nulls(data, ""), findings)
    for alias, target in SECTION_ALIASES.items():
        _move(result, alias, target, findings)
    _legacy_zero(result, findings)
    _take_candidates(result, findings)
    _take_sampling(result, findings)
    for name in SWITCHED:
        # The other keys of a disabled section mean nothing, as in DeepSpeed.
        if isinstance(result.get(name), dict) and not truthy(result[name].get("enabled", False)):
            unread = {
                key: value for key, value in result[name].items() if f"{name}.{key}" not in SUPPORT and key != _HOW
            }
            result[name] = {**({"enabled": False} if "enabled" in result[name] else {}), **unread}
    for alias, row in SUPPORT.items():
        if row.status is Status.MAPPED and not alias.endswith(")"):
            _move(result, alias, row.target, findings)
    return result


def _unwrapped(data: dict[str, object], findings: Findings) -> dict[str, Any]:
    """`data` with the content of a key that holds a whole configuration moved to the top level; records a problem."""
    for key, inner in data.items():
        if not isinstance(inner, dict) or key in known_keys(""):
            continue
        inside = [name for name in inner if name in known_keys("")]
        if inside and (key in _WRAPPERS or any(name in _TELLING for name in inside)):
            expected = "holds a whole configuration, which is read at the top level only"
            findings.problem(key, expected, "Move its keys to the top level.")
            findings.written.update({name: (f"{key}.{name}", inner[name]) for name in inner if name not in data})
            return {**inner, **{name: value for name, value in data.items() if name != key}}
    return data


def _without_nulls(node: object, path: str) -> Any:
    """null means absent, except among the arguments of an optimizer or schedule."""
    if not isinstance(node, dict) or path in FREE_FORM:
        return node
    kept = {key: value for key, value in node.items() if value is not None}
    return {key: _without_nulls(value, f"{path}.{key}" if path else key) for key, value in kept.items()}


def _legacy_zero(data: dict[str, object], findings: Findings) -> None:
    """`"zero_optimization": true` is stage 1."""
    value = data.get("zero_optimization")
    if isinstance(value, bool):
        data["zero_optimization"] = {"stage": int(value)}
        findings.written["zero_optimization.stage"] = ("zero_optimization", value)


def _take_candidates(data: dict[str, object], findings: Findings) -> None:
    """Lists of candidates for `hf-dist tune`. All stages give the same numbers, so training uses the one with least memory."""
    zero = data.get("zero_optimization")
    if is_off(data.get("autotuning")) or not isinstance(zero, dict):
        return
    stages = zero.get("stage")
    if isinstance(stages, list) and stages and all(stage in (0, 1, 2, 3) for stage in stages):
        zero["stage"] = max(stages)
        findings.note(
            "zero_optimization.stage", f"{stages} is read as {max(stages)}; `hf-dist tune` tries them all", "read"
        )


def _take_sampling(data: dict[str, object], findings: Findings) -> None:
    """Move the sequence-length metric of `data_efficiency.data_sampling` to `curriculum_learning`."""
    path = "data_efficiency.data_sampling.curriculum_learning"
    metrics = data.get("data_efficiency")
    if is_off(metrics):
        return
    for part in ("data_sampling", "curriculum_learning", "curriculum_metrics"):
        metrics = metrics.get(part) if isinstance(metrics, dict) else None
        if is_off(metrics) and part != "curriculum_metrics":
            return
    for name, metric in metrics.items() if isinstance(metrics, dict) else ():
        where = f"{path}.curriculum_metrics.{name}"
        if "seqlen" not in name or not isinstance(metric, dict):
            expected = "is not supported: it needs an index of the whole data set; only a length of sequences can grow"
            findings.problem(where, expected, "Remove the key.")
        elif "curriculum_learning" in data:
            findings.problem(where, 'contradicts "curriculum_learning"', "Remove the key.")
        else:
            kept = {
                key: value for key, value in metric.items() if f"curriculum_learning.{key}" in SUPPORT or key == _HOW
            }
            data["curriculum_learning"] = {"enabled": True, **kept}
            findings.written["curriculum_learning"] = (where, metric)


def _move(data: dict[str, object], alias: str, target: str, findings: Findings) -> None:
    """Move the value at `alias` to `target`. Different values at both are a problem."""
    parent = _section(data, alias)
    key = alias.rpartition(".")[2]
    if parent is None or key not in parent:
        return
    written = parent.pop(key)
    try:
        value = _meant(alias, target, written)
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
                alias,
                f'contradicts "{target}", the newer name of the same key',
                f'Remove "{findings.spelled(alias)}".',
                written,
            )
        return
    home[name] = value
    findings.written[target] = (alias, written)


def _meant(alias: str, target: str, written: object) -> object:
    """The value for the newer key, or None. An old key may be a switch where the newer key is not, or its opposite."""
    if target.endswith(".device"):
        return "cpu" if values.flag(written) else None
    return not values.flag(written) if alias.endswith(".disable") else written


def _section(data: dict[str, object], path: str, create: bool = False) -> dict[str, Any] | None:
    """The object that holds the last key of `path`; None if it is missing or not an object."""
    node = data
    for part in path.split(".")[:-1]:
        if create:
            node.setdefault(part, {})
        child = node.get(part)
        if not isinstance(child, dict):
            return None
        node = child
    return node
