"""The JSON Schema of the config, for editors that complete keys and check values."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from hf_dist.config.arguments import DEEPSPEED_SCHEDULES, OPTIMIZER_ARGUMENTS, TORCH_SCHEDULES
from hf_dist.config.auto import AUTO_TABLE
from hf_dist.config.meaning import meaning
from hf_dist.config.rows import Status
from hf_dist.config.schema import fields, section_of
from hf_dist.config.support import FREE_FORM, STRICT, SUPPORT

_VERSION = "https://json-schema.org/draft/2020-12/schema"
_REMARKS = "^(_|comment|//|#|\\$)"
"""Keys that hold remarks; see `hf_dist.config.keys.is_comment`."""


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the config, so that editors complete keys and check values."""
    root: dict[str, Any] = {"properties": {}}
    for path in SUPPORT:
        if not path.endswith((".*", ")")):
            _place(root, path.split("."), _leaf(path))
    for section in FREE_FORM:
        if section in ("optimizer.params", "scheduler.params"):
            _section(root, section.split("."))["additionalProperties"] = True
    for section in STRICT:
        node = _section(root, section.split("."))
        node["additionalProperties"] = False
        node["patternProperties"] = {_REMARKS: True}
    head = {"$schema": _VERSION, "title": "hf_dist configuration", "type": "object"}
    return {**head, **_typed_objects(root)}


def _leaf(path: str) -> dict[str, Any]:
    """The schema of one key."""
    row = SUPPORT[path]
    result: dict[str, Any] = {"description": meaning(path)}
    if row.status in (Status.REFUSED, Status.MAPPED):
        result["deprecated"] = True
    field = fields().get(path)
    if path == "optimizer.type":
        result["enum"] = sorted(OPTIMIZER_ARGUMENTS)
    elif path == "scheduler.type":
        result["enum"] = sorted({**DEEPSPEED_SCHEDULES, **TORCH_SCHEDULES})
    elif field is not None and section_of(field) is None:
        result.update(_type(field.annotation))
        if field.default is not None:
            result["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if any(rule.path == path for rule in AUTO_TABLE) and "anyOf" not in result:
        known = result.pop("type", None)
        if known is not None:
            result["anyOf"] = [{"type": known}, {"const": "auto"}]
    return result


def _type(kind: object) -> dict[str, Any]:
    """The JSON types of a Python annotation."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [_type(part) for part in typing.get_args(kind) if part is not type(None)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    if typing.get_origin(kind) is typing.Annotated:
        return _type(typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        names = list(typing.get_args(kind))
        return {"const": names[0]} if len(names) == 1 else {"enum": names}
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _type(typing.get_args(kind)[0])}
    simple = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": simple[kind]} if kind in simple else {}


def _section(root: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The schema of the object at `path`, created if missing."""
    node = root
    for part in path:
        node = node.setdefault("properties", {}).setdefault(part, {})
    return node


def _place(root: dict[str, object], path: list[str], leaf: dict[str, object]) -> None:
    _section(root, path[:-1]).setdefault("properties", {}).setdefault(path[-1], {}).update(leaf)


def _typed_objects(node: dict[str, Any]) -> dict[str, Any]:
    """`node` with "type": "object" wherever there are properties."""
    if "properties" not in node:
        return node
    properties = {key: _typed_objects(child) for key, child in node["properties"].items()}
    return {**node, "type": "object", "properties": properties}
