"""The JSON Schema and the meanings: every key is there, with words, and the shipped configs fit."""

from __future__ import annotations

import ast
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from hf_dist.config import load_config
from hf_dist.config.argument_words import OPTIMIZER_WORDS, SCHEDULER_WORDS
from hf_dist.config.arguments import DEEPSPEED_SCHEDULES, OPTIMIZER_ARGUMENTS, TORCH_SCHEDULES
from hf_dist.config.json_schema import json_schema, schema_file, schema_reference
from hf_dist.config.meaning import meaning, sentences
from hf_dist.config.normalise import SWITCHED
from hf_dist.config.rows import Status
from hf_dist.config.support import SUPPORT
from hf_dist.config.unknown import SECTIONS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SOURCES = CONFIGS.parent / "hf_dist" / "config"


def node_at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The part of the schema about one key."""
    for part in path.split("."):
        schema = schema["properties"][part]
    return schema


@cache
def validator() -> jsonschema.Draft202012Validator:
    """What refuses a value where an editor would."""
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def fits(data: dict[str, Any]) -> bool:
    """Whether an editor shows nothing wrong in `data`."""
    return bool(validator().is_valid(data))


def test_every_key_of_the_table_is_in_the_schema_with_words() -> None:
    schema = json_schema()
    for path in SUPPORT:
        if not path.endswith((".*", ")")) and ".zenflow." not in path:
            assert node_at(schema, path)["description"], path
            assert meaning(path), path


def test_every_field_has_a_sentence_that_ends_like_one() -> None:
    assert len(sentences()) > 90
    for path, sentence in sentences().items():
        assert sentence.endswith(".") and not sentence.startswith("`"), (path, sentence)


def test_types_bounds_defaults_and_auto_are_those_of_the_fields() -> None:
    schema = json_schema()

    def taken(path: str) -> dict[str, Any]:
        node = node_at(schema, path)
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    assert {"enum": [0, 1, 2, 3, "0", "1", "2", "3"]} in taken("zero_optimization.stage")["anyOf"]
    count = taken("fp16.hysteresis")
    assert count["type"] == ["integer", "string", "null"] and count["minimum"] == 1
    assert taken("local_sgd.mix")["exclusiveMaximum"] == 1
    assert taken("zero_optimization.offload_optimizer.ratio")["maximum"] == 1
    assert any(part.get("enum") == ["auto"] for part in taken("fp16.enabled")["anyOf"])
    assert node_at(schema, "fp16.initial_scale_power")["default"] == 16
    assert "AdamW" in taken("optimizer.type")["anyOf"][0]["enum"]
    deprecated = {path for path, row in SUPPORT.items() if row.status is not Status.USED}
    assert all(
        node_at(schema, path)["deprecated"]
        for path in deprecated
        if not path.endswith(("*", ")")) and ".zenflow." not in path
    )


def test_every_section_has_words_and_is_closed() -> None:
    schema = json_schema()
    for section in SECTIONS - {"zero_optimization.zenflow", "amp"}:
        node = node_at(schema, section)
        assert node["description"] and node["description"] == meaning(section), section
        is_read_when_on = section.partition(".")[0] in SWITCHED
        closed = node if "additionalProperties" in node else node.get("else", {})
        assert closed.get("additionalProperties") is False or section.endswith(".params") or is_read_when_on, section
    assert schema["additionalProperties"] is False and schema["$id"].startswith("https://")


def test_every_argument_of_an_optimizer_or_schedule_has_words() -> None:
    assert set().union(*OPTIMIZER_ARGUMENTS.values()) == set(OPTIMIZER_WORDS)
    assert set().union(*DEEPSPEED_SCHEDULES.values(), *TORCH_SCHEDULES.values()) == set(SCHEDULER_WORDS)
    schema = json_schema()
    assert node_at(schema, "optimizer.params.nesterov")["description"] == "whether the momentum is Nesterov's."
    assert fits({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}})
    assert not fits({"optimizer": {"type": "AdamW", "params": {"nesterov": True}}})
    assert not fits({"scheduler": {"type": "StepLR", "params": {"gamma": 0.1}}})  # step_size is missing


def test_a_file_can_name_its_schema_wherever_it_lies(tmp_path: Path) -> None:
    shipped = CONFIGS / "schema" / "hf_dist.schema.json"
    assert schema_file() == shipped
    assert schema_reference(CONFIGS / "mine.json") == "schema/hf_dist.schema.json"
    assert schema_reference(CONFIGS.parent / "examples" / "mine.json") == "../configs/schema/hf_dist.schema.json"
    elsewhere = schema_reference(tmp_path / "mine.json")
    assert elsewhere == shipped.as_uri() and elsewhere.startswith("file:///")
    assert fits({"$schema": elsewhere})


def test_the_shipped_schema_is_the_one_of_the_code_and_configs_name_it() -> None:
    shipped = CONFIGS / "schema" / "hf_dist.schema.json"
    remedy = "run: hf-dist config schema > configs/schema/hf_dist.schema.json"
    assert json.loads(shipped.read_text()) == json_schema(), remedy
    for path in CONFIGS.glob("*.json"):
        data = json.loads(path.read_text())
        assert (CONFIGS / data["$schema"]) == shipped, path.name
        assert fits(data), path.name
        load_config(path)


def test_a_slip_does_not_fit_the_schema() -> None:
    assert fits({"zero_optimization": {"stage": 3, "overlap_comm": True}})
    for slip in ({"stage": 4}, {"stge": 1}, {"overlap_comm": "yes"}, {"offload_param": {"device": "disk"}}):
        assert not fits({"zero_optimization": slip}), slip
    for slip in (
        {"zero_optimisation": {"stage": 3}},
        {"tp_size": 2},
        {"fsdp": "full_shard"},
        {"compression_training": {"pruning": {"enabled": True}}},
    ):
        assert not fits(slip), slip


def test_what_check_takes_fits() -> None:
    """Numbers in quotes, other letter cases, null, sections that are off, lists for `hf-dist tune`."""
    for data in (
        {"zero_optimization": {"stage": "3", "reduce_bucket_size": "5e8", "overlap_comm": "True"}, "fp16": None},
        {"optimizer": {"type": "adamw", "params": {"lr": "AUTO"}}, "train_batch_size": None},
        {"flops_profiler": {"enabled": False, "top_modules": "none"}, "amp": {"enabled": False, "opt_level": "O1"}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"autotuning": {"enabled": True}, "zero_optimization": {"stage": [1, 2, 3]}},
        {"bfloat16": {"enabled": True}, "_comment": "mine", "zero_optimization": {"// why": 1}},
    ):
        load_config(data)
        assert fits(data), data
    for data in ({"elasticity": {"enabled": True, "min_gpus": 0}}, {"elasticity": {"min_gps": 1}}):
        assert not fits(data), data
    assert not fits({"zero_optimization": {"stage": [1, 2, 3]}})


def test_each_sentence_names_its_own_key() -> None:
    """A sentence copied from the neighbour would be shown by editors and by `hf-dist config explain`."""
    wrong = []
    for path in sorted(SOURCES.glob("*.py")):
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
