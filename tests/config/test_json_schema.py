"""The JSON Schema and the meanings: every key is there, with words, and the shipped configs fit."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

from hf_dist.config import load_config
from hf_dist.config.json_schema import json_schema
from hf_dist.config.meaning import meaning, sentences
from hf_dist.config.rows import Status
from hf_dist.config.support import STRICT, SUPPORT

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SECTIONS = CONFIGS.parent / "hf_dist" / "config"


def node_at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The part of the schema about one key."""
    for part in path.split("."):
        schema = schema["properties"][part]
    return schema


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is of the type, among the names and in a known place: the part of JSON Schema that is used."""
    if "anyOf" in schema:
        return any(fits(part, value) for part in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    if schema.get("type") == "object":
        known = schema["properties"]
        if not schema.get("additionalProperties", True) and not set(value) <= set(known):
            return False
        return isinstance(value, dict) and all(fits(known[key], value[key]) for key in value if key in known)
    kinds = {"boolean": bool, "string": str, "array": list, "integer": int, "number": (int, float)}
    kind = kinds.get(schema.get("type", ""))
    return kind is None or (isinstance(value, kind) and (schema["type"] == "boolean" or not isinstance(value, bool)))


def test_every_key_of_the_table_is_in_the_schema_with_words() -> None:
    schema = json_schema()
    for path in SUPPORT:
        if not path.endswith((".*", ")")):
            assert node_at(schema, path)["description"], path
            assert meaning(path), path


def test_every_field_has_a_sentence_that_ends_like_one() -> None:
    assert len(sentences()) > 90
    for path, sentence in sentences().items():
        assert sentence.endswith(".") and not sentence.startswith("`"), (path, sentence)


def test_types_defaults_and_auto_are_those_of_the_fields() -> None:
    schema = json_schema()
    assert node_at(schema, "zero_optimization.stage")["enum"] == [0, 1, 2, 3]
    assert node_at(schema, "fp16.enabled")["anyOf"] == [{"type": "boolean"}, {"const": "auto"}]
    assert node_at(schema, "fp16.initial_scale_power")["default"] == 16
    assert "AdamW" in node_at(schema, "optimizer.type")["enum"]
    assert node_at(schema, "zero_optimization.cpu_offload")["deprecated"] is True
    for section in STRICT:
        assert node_at(schema, section)["additionalProperties"] is False
    deprecated = {path for path, row in SUPPORT.items() if row.status is Status.REFUSED}
    assert all(node_at(schema, path)["deprecated"] for path in deprecated if not path.endswith("*"))


def test_the_shipped_schema_is_the_one_of_the_code_and_configs_name_it() -> None:
    shipped = CONFIGS / "schema" / "hf_dist.schema.json"
    remedy = "run: hf-dist config schema > configs/schema/hf_dist.schema.json"
    assert json.loads(shipped.read_text()) == json_schema(), remedy
    for path in CONFIGS.glob("*.json"):
        data = json.loads(path.read_text())
        assert (CONFIGS / data["$schema"]) == shipped, path.name
        assert fits(json_schema(), data), path.name
        load_config(path)


def test_a_slip_does_not_fit_the_schema() -> None:
    schema = json_schema()
    assert fits(schema, {"zero_optimization": {"stage": 3, "overlap_comm": True}})
    for slip in ({"stage": 4}, {"stge": 1}, {"overlap_comm": "yes"}, {"offload_param": {"device": "disk"}}):
        assert not fits(schema, {"zero_optimization": slip}), slip


def test_each_sentence_names_its_own_key() -> None:
    """A sentence copied from the neighbour would be shown by editors and by `hf-dist config explain`."""
    wrong = []
    for path in sorted(SECTIONS.glob("*.py")):
        for section in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            body = section.body if isinstance(section, ast.ClassDef) else []
            for field, told in itertools.pairwise(body):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(told, ast.Expr)
                    and isinstance(told.value, ast.Constant)
                ):
                    key = re.match(r"`([\w.]+)`:", str(told.value.value))
                    if key and key[1].rpartition(".")[2] != ast.unparse(field.target):
                        wrong.append(f"{path.name}:{told.lineno}: {key[1]} at {ast.unparse(field.target)}")
    assert wrong == []
