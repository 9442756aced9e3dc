"""Reading: path, dict, JSON text, base64; and texts that are not JSON."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.config import load_config, read_config
from hf_dist.config.scan import scan_json
from hf_dist.errors import ConfigError

DATA: dict[str, Any] = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def error_of(source: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value


@pytest.mark.parametrize(
    "encode",
    [
        json.dumps,
        lambda data: base64.urlsafe_b64encode(json.dumps(data).encode()).decode(),
        MappingProxyType,
        dict,
    ],
    ids=["text", "base64", "mapping", "dict"],
)
def test_every_form_of_source_gives_the_same_config(encode: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + json.dumps(DATA), encoding="utf-8")
    config = load_config(encode(DATA))
    assert config.zero_optimization.stage == 2
    assert read_config(encode(DATA)).data == read_config(path).data == read_config(str(path)).data == DATA


def test_a_dict_is_copied_and_never_changed() -> None:
    data = {"zero_optimization": {"stage": "3", "cpu_offload": False}, "bfloat16": {"enabled": True}, "fp16": None}
    before = copy.deepcopy(data)
    document = read_config(data)
    document.data["zero_optimization"]["stage"] = 0
    load_config(data)
    assert data == before


def test_a_config_is_frozen_and_can_be_copied_and_pickled() -> None:
    config = load_config('{"zero_optimization": {"stage": 3}, "steps_per_print": 5}')
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.notes == config.notes and twin.lines == config.lines
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 3  # type: ignore[misc]
    changed = config.replaced({"zero_optimization.stage": (1, "test")})
    assert (changed.zero_optimization.stage, config.zero_optimization.stage) == (1, 3)
    assert (changed.source_of("zero_optimization.stage"), config.source_of("zero_optimization.stage")) == (
        "test",
        "file",
    )


def test_a_missing_file_gives_the_absolute_path_and_similar_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds_config_zero3.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert str(error_of("ds_config_zero.json")) == (
        f"config: {tmp_path}/ds_config_zero.json does not exist. Did you mean ds_config_zero3.json?"
    )
    assert "There is no directory" in str(error_of("nowhere/ds.json"))
    assert f"The .json files in {tmp_path} are ds_config_zero3.json." in str(error_of("other"))


def test_a_directory_an_empty_name_and_a_binary_file_are_errors(tmp_path: Path) -> None:
    assert "is a directory" in str(error_of(tmp_path))
    assert "is not a path, a dict or a JSON text" in str(error_of(""))
    assert "is not a path, a dict or a JSON text" in str(error_of(None))
    binary = tmp_path / "x.json"
    binary.write_bytes(b"\xff\xfe{")
    assert "is not a UTF-8 text" in str(error_of(binary))


def test_comments_and_trailing_commas_are_read_over_and_lines_stay_right(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n  // first\n  "train_batch_size": 8, # second\n  "fp16": {"b": [1, 2,], },\n  /* x\n */ "stge": 1\n}'
    )
    assert read_config(path).data == {"train_batch_size": 8, "fp16": {"b": [1, 2]}, "stge": 1}
    assert str(error_of(path)).startswith(f'{path}:4: fp16.b: is not a key in "fp16". Remove it; the keys are')
    assert load_config('{"train_batch_size": 8, // eight\n}').notes == ()


def test_a_key_given_twice_is_an_error_with_both_lines() -> None:
    text = '{\n "fp16": {"enabled": true,\n  "enabled": false},\n "zero_optimization": {}\n}'
    assert str(error_of(text)) == (
        "JSON text:3: fp16.enabled: is given twice, on line 2 and on line 3. Keep one of the two."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{'a': 1}",
            "JSON text:1: column 2: expected a key in double quotes, found `'a': 1}`. JSON strings use double quotes.",
        ),
        ('{"a":\n True}', "JSON text:2: column 2: expected a value, found `True}`. Write true."),
        (
            '{"a": 1\n"b": 2}',
            'JSON text:2: column 1: expected "," or "}", found `"b": 2}`. '
            "A comma is probably missing at the end of the line before.",
        ),
        ('{"lr": ${LR}}', "JSON text:1: column 8: expected a value, found `${LR}}`. Fill in the template first."),
        ('{"a": 1', 'JSON text:1: column 8: expected "," or "}", found the end of the text'),
        ('{"a" 1}', 'JSON text:1: column 6: expected ":" after the key "a", found `1}`'),
        ("{} {}", "JSON text:1: column 4: has `{}` after the end of the JSON object. Remove it, or check the braces."),
        ("[1]", "JSON text:1: is not a JSON object. The file must be one {...}."),
        ('{"a": ' + "[" * 70, "is nested more than 64 levels deep"),
    ],
)
def test_a_text_that_is_not_json_names_line_column_and_remedy(text: str, message: str) -> None:
    assert message in str(error_of(text))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(" \n")
    assert str(error_of(path)).startswith(f"{path}:1: is empty; expected a JSON object. Write one")


@given(JSON)
def test_the_scanner_reads_what_the_standard_library_reads(value: object) -> None:
    for indent in (None, 2):
        scanned = scan_json(json.dumps(value, indent=indent), "t")
        assert scanned.value == value and not scanned.problems


def test_lines_are_those_of_the_keys() -> None:
    lines = scan_json('{\n "a": {\n\n  "b": [1,\n {"c": 2}]}, "d": 3}', "t").lines
    assert lines == {"a": 2, "a.b": 4, "a.b.1.c": 5, "d": 5}
