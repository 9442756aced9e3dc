"""The JSON Schema of the config: editors complete keys, and refuse what `hf-dist config check` refuses.

What the schema cannot say: combinations of keys, whose test is `config check`; `hf_dist.strict`; numbers in quotes that are
out of range. It is stricter in one point: a key of another program is a note of `config check`, and an unknown key here.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import PlainValidator
from pydantic.fields import FieldInfo

from hf_dist.config import accepts, params, values
from hf_dist.config.accepts import Accepts, JsonSchema, either, or_null
from hf_dist.config.arguments import DEEPSPEED_SCHEDULES, OPTIMIZER_ARGUMENTS, REQUIRED, TORCH_SCHEDULES
from hf_dist.config.keys import ends_when_off
from hf_dist.config.meaning import meaning
from hf_dist.config.normalise import SWITCHED
from hf_dist.config.rows import OFF, OFF_DEFINITION, Status
from hf_dist.config.schema import fields
from hf_dist.config.support import FREE_FORM, IDLE_VALUES, SECTION_ALIASES, SUPPORT
from hf_dist.config.unknown import SECTIONS, known_keys
from hf_dist.version import REPOSITORY

__all__ = ["SCHEMA_ID", "accepted_at", "children", "json_schema", "schema_file", "schema_reference"]

SCHEMA_ID = f"{REPOSITORY}/raw/main/configs/schema/hf_dist.schema.json"
"""The name of the schema. Files name the schema by a path, see `schema_reference`."""
_VERSION = "https://json-schema.org/draft/2020-12/schema"
_REMARKS: JsonSchema = {"^(_|comment|//|#|\\$)": True}
"""Keys that hold remarks; see `hf_dist.config.keys.is_comment`."""
_CLOSED: JsonSchema = {"patternProperties": _REMARKS, "additionalProperties": False}
_NVME: JsonSchema = {
    "if": {"required": ["device"], "properties": {"device": {"type": "string", "pattern": accepts.any_case("nvme")}}},
    "then": {"required": ["nvme_path"], "properties": {"nvme_path": {"type": "string"}}},
}
_SERVED: Mapping[str, Mapping[str, typing.Collection[str]]] = {
    "optimizer": OPTIMIZER_ARGUMENTS,
    "scheduler": {**DEEPSPEED_SCHEDULES, **TORCH_SCHEDULES},
}
_KINDS: Mapping[str, Mapping[str, Accepts]] = {
    "optimizer": params.OPTIMIZER_VALUES,
    "scheduler": params.SCHEDULER_VALUES,
}


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the config, so that editors complete keys and check values."""
    lists = {"properties": {"zero_optimization": {"properties": {"stage": {"not": {"type": "array"}}}}}}
    tuned = {"required": ["autotuning"], "properties": {"autotuning": {"not": OFF}}}
    head = {"$schema": _VERSION, "$id": SCHEMA_ID, "title": "hf_dist configuration"}
    definitions: dict[str, Any] = {"off": OFF_DEFINITION}
    body = _shared(_object(""), definitions)
    return {**head, **body, "type": "object", "if": tuned, "else": lists, "$defs": definitions}


def _shared(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`node` with what many keys take alike moved to `definitions`, under a name made of its words."""
    result = {}
    for key, value in node.items():
        result[key] = _shared(value, definitions) if isinstance(value, dict) else value
        if key == "allOf":
            result[key] = [_shared(part, definitions) for part in value]
    if not {"anyOf", "pattern"} & set(result) or "description" not in result:
        return result
    words: dict[str, Any] = {key: result[key] for key in ("description", "deprecated", "default") if key in result}
    taken = {key: value for key, value in result.items() if key not in words}
    message = next(iter(re.findall(r'"errorMessage": "This is not (.*?)\."[,}]', json.dumps(taken))), "plain")
    name = re.sub(r"[^a-z0-9]+", "_", message.lower()).strip("_")[:60]
    same = (name if n == 0 else f"{name}_{n + 1}" for n in itertools.count())
    name = next(each for each in same if definitions.get(each, taken) == taken)
    definitions[name] = taken
    return {**words, "$ref": f"#/$defs/{name}"}


def schema_file() -> Path | None:
    """The schema's file of this installation; None if the package was copied without it."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "configs", package.parent / "configs")
    return next((f for place in places if (f := place / "schema" / "hf_dist.schema.json").is_file()), None)


def schema_reference(config: Path) -> str:
    """The value of "$schema" for the file `config`: a relative path to the schema nearby, else a URL of its file.

    A path goes with a folder that is moved or committed. It is used where both files are below one folder of the user's:
    the working directory, or the repository that holds the schema.
    """
    schema, folder = schema_file(), config.expanduser().resolve().parent
    if schema is None:
        return SCHEMA_ID
    shared = [root for root in (Path.cwd().resolve(), schema.parents[2]) if schema.is_relative_to(root)]
    is_installed = "site-packages" in schema.parts
    if not is_installed and any(folder.is_relative_to(root) for root in shared):
        return Path(os.path.relpath(schema, folder)).as_posix()
    return schema.as_uri()


def accepted_at(path: str) -> Accepts | None:
    """What the key at `path` takes; None if it takes anything."""
    row, field = SUPPORT.get(path), fields().get(path)
    section, _, name = path.rpartition(".")
    if row is not None and row.status is Status.REFUSED:
        return row.accepted
    if row is not None and row.status is Status.MAPPED:
        is_switch = row.target.endswith(".device") or path.endswith(".disable")
        return values.flag if is_switch else accepted_at(row.target)
    if row is not None and row.status is Status.NO_EFFECT:
        return IDLE_VALUES.get(path)
    if name == "type" and section in _SERVED:
        served = tuple(_SERVED[section])
        pattern = accepts.any_case(*served, prefixes=params.TYPE_PREFIXES)
        schema = either({"enum": sorted(served)}, {"type": "string", "pattern": pattern})
        return Accepts(str, schema, f"one of {', '.join(served)}")
    if section.endswith(".params"):
        kind = section.partition(".")[0]
        return _KINDS[kind].get(name, params.plain if kind == "optimizer" else None)
    return None if field is None else _coercion(field)


def _coercion(field: FieldInfo) -> Accepts | None:
    parts = [*field.metadata, *(each for kind in typing.get_args(field.annotation) for each in typing.get_args(kind))]
    found = [part.func for part in parts if isinstance(part, PlainValidator)]
    return found[0] if found and isinstance(found[0], Accepts) else None


def _leaf(path: str) -> dict[str, Any]:
    """The schema of one key."""
    field, taken = fields().get(path), accepted_at(path)
    result = _words(path)
    if field is not None and not field.is_required() and field.default is not None:
        result["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if path == "zero_optimization.stage":
        stages: JsonSchema = {"type": "array", "minItems": 1, "items": {"enum": [0, 1, 2, 3]}}
        return {**result, **or_null(either(values.stage.schema, stages))}
    if taken is None:
        return {**result, **({"type": ["object", "null"]} if path == "tensor_parallel.partition_config" else {})}
    return {**result, **_explained(or_null(_own(path, taken.schema)), taken.words)}


def _own(path: str, schema: JsonSchema) -> JsonSchema:
    """`schema`, and what single optimizers take under the same name; `_for_type` tells them apart."""
    home, _, name = path.rpartition(".")
    others = [
        taken.schema for (_, key), taken in params.OWN_VALUES.items() if (home, key) == ("optimizer.params", name)
    ]
    return either(schema, *others) if others else schema


def _explained(schema: JsonSchema, words: str) -> JsonSchema:
    """`schema` with the sentence that VS Code shows where a value does not fit."""
    if not words:
        return schema
    if "anyOf" in schema:
        return {"anyOf": [_explained(part, words) for part in schema["anyOf"]]}
    return {**schema, "errorMessage": f"This is not {words}."}


def _words(path: str) -> dict[str, Any]:
    """The description of a key or section. What is moved, ignored or refused by name is shown as deprecated."""
    row = SUPPORT.get(path)
    result: dict[str, Any] = {"description": meaning(path)}
    if path in SECTION_ALIASES or (row is not None and row.status is not Status.USED):
        result["deprecated"] = True
    return result


def children(section: str) -> Iterator[tuple[str, str]]:
    """Name and path of every key of a section; "" is the top level."""
    prefix = f"{section}." if section else ""
    for name in sorted(known_keys(section)):
        yield name, prefix + name
    if section.endswith(".params"):
        kind = section.partition(".")[0]
        for name in sorted(set().union(*_SERVED[kind].values()) - known_keys(section)):
            yield name, prefix + name


def _node(path: str) -> dict[str, Any]:
    """The schema of a key or of a section."""
    if path in SECTION_ALIASES:
        there = SECTION_ALIASES[path].replace(".", "/properties/")
        return {**_words(path), "$ref": f"#/properties/{there}"}
    if path in FREE_FORM and not path.endswith(".params"):
        taken = accepted_at(path)
        return {**_words(path), **or_null(taken.schema if taken else {"type": "object"})}
    return _object(path) if path in SECTIONS else _leaf(path)


def _object(section: str) -> dict[str, Any]:
    """The schema of a section. Where a section that is off is not read, its values are not checked either."""
    nodes = {name: _node(path) for name, path in children(section)}
    loose = {name: node if name == "enabled" else _only_words(node) for name, node in nodes.items()}
    kinds = ["object", "boolean", "null"] if section == "zero_optimization" else ["object", "null"]
    result: dict[str, Any] = {**_words(section), "type": kinds}
    enabled: dict[str, Any] = {"required": ["enabled"], "properties": {"enabled": OFF}}
    if section in SWITCHED:
        is_on = {"required": ["enabled"], "properties": {"enabled": {"not": OFF}}}
        return {**result, "properties": loose, **_CLOSED, "if": is_on, "then": {"properties": nodes}}
    if ends_when_off(section) and "enabled" in nodes:
        return {**result, "properties": loose, "if": enabled, "else": {"properties": nodes, **_CLOSED}}
    result |= {"properties": nodes, **({} if f"{section}.*" in SUPPORT else _CLOSED)}
    if section in _SERVED:
        result |= {"required": ["type"], "allOf": [_for_type(section, name) for name in _SERVED[section]]}
    return {**result, **(_NVME if "nvme_path" in nodes else {})}


def _only_words(node: Mapping[str, Any]) -> dict[str, Any]:
    """`node` without what it asks of a value, with its keys."""
    words: dict[str, Any] = {key: node[key] for key in ("description", "deprecated", "default") if key in node}
    keys = {name: _only_words(child) for name, child in node.get("properties", {}).items()}
    return {**words, "properties": keys} if keys else words


def _for_type(section: str, kind: str) -> dict[str, Any]:
    """The arguments of one optimizer or schedule."""
    refused = {name for name, path in children(f"{section}.params") if _is_refused(path)}
    known = {name: True for name in sorted(set(_SERVED[section][kind]) - refused)}
    own = {
        key: taken.schema for (name, key), taken in params.OWN_VALUES.items() if (section, name) == ("optimizer", kind)
    }
    shared = {
        key: accepted_at(f"{section}.params.{key}") for _, key in params.OWN_VALUES if key in known and key not in own
    }
    exact = {**own, **{key: taken.schema for key, taken in shared.items() if taken is not None}}
    fits: dict[str, Any] = {"properties": {**known, **{key: or_null(each) for key, each in exact.items()}}, **_CLOSED}
    needed = list(REQUIRED.get(kind, ())) if section == "scheduler" else []
    outer = {"required": ["params"]} if needed else {}
    is_kind = {"type": "string", "pattern": accepts.any_case(kind, prefixes=params.TYPE_PREFIXES)}
    then = {**outer, "properties": {"params": {**fits, **({"type": "object", "required": needed} if needed else {})}}}
    return {"if": {"required": ["type"], "properties": {"type": is_kind}}, "then": then}


def _is_refused(path: str) -> bool:
    row = SUPPORT.get(path)
    return row is not None and row.status is Status.REFUSED
