"""Every key of a config against the support table: refused, without effect, misspelled, in the wrong place, unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dist.config.findings import Findings
from hf_dist.config.rows import Status, is_off
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.support import FREE_FORM, IDLE_VALUES, STRICT, SUPPORT
from hf_dist.config.values import BadValue

SECTIONS = frozenset(key.rsplit(".", cut)[0] for key in SUPPORT for cut in range(1, key.count(".") + 1))
"""Every path that holds other keys."""

_AMBIGUOUS = frozenset(
    {"enabled", "type", "params", "names", "classes", "strict", "device", "dtype", "momentum", "mpu", "stages"}
)


def check_keys(data: Mapping[str, Any], findings: Findings) -> None:
    """Record a problem or a note for every key of normalised `data` that is not simply used."""
    _walk(data, "", findings)


def is_comment(key: str) -> bool:
    """Whether a key is a remark: `_comment`, `comment`, `//`, `#`."""
    return key.startswith(("_", "comment", "//", "#", "$"))


def known_keys(section: str) -> frozenset[str]:
    """The keys that may stand directly in `section`, "" for the top level."""
    prefix = f"{section}." if section else ""
    below = (key[len(prefix) :].split(".")[0] for key in SUPPORT if key.startswith(prefix))
    return frozenset(key for key in below if key.isidentifier())


def _walk(section: Mapping[str, Any], path: str, findings: Findings) -> None:
    common = _common_reason(path)
    if common and is_off(section.get("enabled", True)):
        return
    for key, value in section.items():
        where = f"{path}.{key}" if path else key
        row = SUPPORT.get(where)
        if where in SECTIONS and (where not in FREE_FORM or not isinstance(value, Mapping)):
            if (
                row is not None
                and row.status is Status.REFUSED
                and not isinstance(value, Mapping)
                and row.accepted(value)
            ):
                continue
            if isinstance(value, Mapping):
                _walk(value, where, findings)
            else:
                findings.problem(where, "is not an object", _object_example(where), found=value)
        elif row is None:
            if f"{path}.*" not in SUPPORT:
                _unknown(key, path, findings)
        elif row.status is Status.REFUSED and not row.accepted(value):
            findings.problem(where, row.reason, row.fix, found=value)
        elif row.status is Status.NO_EFFECT and _is_sound(where, value, findings) and not row.accepted(value):
            findings.note(path if common else where, row.reason)


def _is_sound(path: str, value: Any, findings: Findings) -> bool:
    """Whether a value without effect is at least one that could have had one; records the problem if it is not."""
    coerce = IDLE_VALUES.get(path)
    try:
        if coerce is not None:
            coerce(value)
    except BadValue as bad:
        findings.problem(path, bad.clause, bad.fix, found=value)
        return False
    return True


def _object_example(path: str) -> str:
    if f"{path}.enabled" in SUPPORT:
        return f'Write "{path}": {{"enabled": true}} or {{"enabled": false}}.'
    if f"{path}.device" in SUPPORT:
        return f'Remove the key or write "{path.rpartition(".")[2]}": {{"device": "none"}}.'
    return f'Write "{path.rpartition(".")[2]}": {{...}}.'


def _common_reason(path: str) -> str:
    """The reason shared by all keys of a section none of which has an effect; empty otherwise."""
    if not path:
        return ""
    rows = [row for key, row in SUPPORT.items() if key.startswith(f"{path}.") and row.status is not Status.MAPPED]
    reasons = {row.reason if row.status is Status.NO_EFFECT else "" for row in rows}
    return reasons.pop() if len(reasons) == 1 else ""


def _unknown(key: str, path: str, findings: Findings) -> None:
    where = f"{path}.{key}" if path else key
    here = f'in "{path}"' if path else "at the top level"
    if is_comment(key):
        findings.note(where, "a comment", "comment")
        return
    right = _PLACES.get(key)
    if right is not None and right != where:
        target = f'"{right}"' if "." in right else f'the top level, as "{right}"'
        findings.problem(where, f"does not belong {here}", f"Move it to {target}.")
        return
    fix = did_you_mean(key, known_keys(path))
    elsewhere = _HOMES.get(key, ())
    if fix:
        findings.problem(where, f"is not a key {here}", fix)
    elif elsewhere:
        places = " or ".join(f'"{home}"' for home in elsewhere)
        findings.problem(where, f"does not belong {here}", f"Move it to {places}.")
    elif path in STRICT:
        known = ", ".join(sorted(known_keys(path)))
        fix = "Remove it." if len(known) > 200 else f"Remove it; the keys are {known}."
        findings.problem(where, f"is not a key {here}", fix)
    else:
        findings.note(where, "not a key of this schema")


def _places() -> dict[str, str]:
    """Key name -> the one path where it belongs, for names that mean one thing wherever they stand."""
    found: dict[str, set[str]] = {}
    for path, row in SUPPORT.items():
        parts = path.split(".")
        if row.status is not Status.NO_EFFECT or parts[0] == "zero_optimization" or len(parts) == 1:
            found.setdefault(parts[-1], set()).add(path)
        found.setdefault(parts[0], set()).add(parts[0])
    places = {key: paths.pop() for key, paths in found.items() if len(paths) == 1 and key not in _AMBIGUOUS}
    return {
        **places,
        "max_grad_norm": "gradient_clipping",
        "learning_rate": "optimizer.params.lr",
        "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    }


def _homes() -> dict[str, tuple[str, ...]]:
    """Key name -> every path where it belongs, for names of two words or more, which other programs hardly use."""
    found: dict[str, list[str]] = {}
    for path in SUPPORT:
        key = path.rpartition(".")[2]
        if "_" in key and key.isidentifier():
            found.setdefault(key, []).append(path)
    return {key: tuple(paths) for key, paths in found.items()}


_PLACES, _HOMES = _places(), _homes()
