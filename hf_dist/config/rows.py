"""Rows of the support table: what can happen to a key, and which values request nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hf_dist.config import accepts
from hf_dist.config.accepts import Accepts, JsonSchema, either, taking


class Status(Enum):
    """What happens to a key."""

    USED = "used"
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


OFF: JsonSchema = {"$ref": "#/$defs/off"}
_FALSY = either(
    {"enum": [False, 0, "", [], {}]}, {"type": "string", "pattern": accepts.any_case("false", "0")}, {"type": "null"}
)
OFF_DEFINITION: JsonSchema = either(
    _FALSY,
    {"type": "string", "pattern": accepts.any_case("none")},
    {"type": "object", "required": ["enabled"], "properties": {"enabled": _FALSY}},
    {
        "type": "object",
        "properties": {"enabled": False},
        "additionalProperties": either({"not": {"type": "object"}}, OFF),
    },
)
"""The definition that `OFF` refers to."""


@taking(OFF)
def is_off(value: object) -> bool:
    """Nothing is requested: null, false, 0, "none", empty, or an object that is not `enabled` and has no other active value."""
    if isinstance(value, Mapping):
        if "enabled" in value and not truthy(value["enabled"]):
            return True
        return not any(
            truthy(v) if k == "enabled" else isinstance(v, Mapping) and not is_off(v) for k, v in value.items()
        )
    return not truthy(value) or str(value).strip().lower() == "none"


def truthy(value: object) -> bool:
    """Whether a value switches something on; the string "false" counts as false."""
    return bool(value) and str(value).strip().lower() not in ("false", "0")


def is_true(value: object) -> bool:
    """Whether a value is true, in any spelling."""
    return truthy(value) and str(value).lower() in ("true", "1")


@taking(either({"type": "number", "maximum": 1}, accepts.names("auto", "none", "0", "1"), {"type": "boolean"}))
def at_most_one(value: Any) -> bool:
    """Whether a degree requests no splitting: 0, 1, "auto", "none"."""
    try:
        return str(value).strip().lower() in ("auto", "none") or float(value) <= 1
    except (TypeError, ValueError):
        return False


def is_any_of(*accepted: str) -> Accepts:
    """A test for values whose text is one of `accepted`."""
    return Accepts(lambda value: str(value).strip().lower() in accepted, accepts.names(*accepted))


@taking({"type": "null"})
def is_null(value: object) -> bool:
    """Nothing but null requests nothing."""
    return value is None


@taking({"enum": [False, 0, "", [], {}]})
def is_empty(value: object) -> bool:
    """Nothing is requested: false, 0, or nothing inside."""
    return not value


@taking(accepts.NOTHING)
def never(value: object) -> bool:
    """Every value requests something."""
    return False


@taking({})
def always(value: object) -> bool:
    """No value needs a word."""
    return True


@dataclass(frozen=True)
class Support:
    """One row of the table."""

    status: Status
    reason: str = ""
    """NO_EFFECT: a few words for the log; REFUSED: a clause that follows the value."""
    fix: str = ""
    """REFUSED: what to do instead, as a sentence."""
    target: str = ""
    """MAPPED: the canonical JSON path."""
    accepted: Accepts = never
    """Values that request what happens anyway: no error, no note."""


def rows(section: str, keys: str, support: Support) -> dict[str, Support]:
    """The same row for several space-separated keys of one section ("" for the top level)."""
    prefix = f"{section}." if section else ""
    return {prefix + key: support for key in keys.split()}


def idle(reason: str, accepted: Accepts = never) -> Support:
    """A row for a key that is accepted without effect."""
    return Support(Status.NO_EFFECT, reason, accepted=accepted)


def refused(reason: str, fix: str, accepted: Accepts = is_off) -> Support:
    """A row for a key that is an error."""
    return Support(Status.REFUSED, reason, fix, accepted=accepted)


def later(fix: str, accepted: Accepts = is_off) -> Support:
    """A row for a key that is an error until the feature is built."""
    return refused("is not available yet in this version of hf_dist", fix, accepted)


def moved(target: str) -> Support:
    """A row for another spelling of `target`."""
    return Support(Status.MAPPED, target=target)


USED = Support(Status.USED)
