"""An editor that knows the JSON Schema refuses what `hf-dist config check` refuses: same files, same keys."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from hf_dist.config import load_config, read_config
from hf_dist.config.findings import Note
from hf_dist.config.keys import is_comment
from hf_dist.config.load import examine
from hf_dist.config.unknown import at
from hf_dist.errors import ConfigError
from tests.config.test_corpus import FILES
from tests.config.test_json_schema import validator
from tests.config.test_mutations import CONFIGS, mutations
from tests.config.test_slips import GOOD, INSIDE, TOP_LEVEL, VALUES

NUM_MUTATIONS = 200
FOREIGN = "not a key of this schema"
"""The note about a key of another program, which the schema refuses: it cannot measure how far a name is from ours."""


def squiggles(data: dict[str, Any]) -> set[str]:
    """The keys that an editor underlines; a section in place of a key that it lacks."""
    found: set[str] = set()
    lacking: dict[str, set[str]] = {}
    for error in validator().iter_errors(data):
        path = [part for part in error.absolute_path if isinstance(part, str)]
        if error.validator == "additionalProperties":
            names = set(error.instance) - set(error.schema.get("properties", {}))
            found |= {".".join([*path, name]) for name in names if not is_comment(name)}
        elif error.validator == "required":
            lacking[".".join(path)] = set(error.validator_value) - set(error.instance)
        else:
            found.add(".".join(path))
    # A key that is misspelled or misplaced is one slip: `check` reads it as the key that is lacking.
    unread = {
        section
        for section, names in lacking.items()
        if not any(each.startswith(f"{section}.") or each.rpartition(".")[2] in names for each in found)
    }
    return _of_known_classes(found | unread)


def _of_known_classes(paths: set[str]) -> set[str]:
    """Without the arguments of a class that is wrong itself: of which class would they be?"""
    if {"optimizer.type", "scheduler.type"} & paths:
        return {path for path in paths if ".params." not in path}
    return paths


def refused(data: dict[str, Any]) -> set[str]:
    """The same keys by `config check`, without those that are wrong beside another key only."""
    try:
        config, problems = examine(copy.deepcopy(data))
        notes: Iterable[Note] = config.notes
    except ConfigError as error:
        problems, notes = error.problems, ()
    found = {problem.path for problem in problems if not _needs_another(data, problem.path, problem.expected)}
    found = {_there(data, path) for path in found} | {note.path for note in notes if note.reason == FOREIGN}
    return _of_known_classes(found)


def _there(data: dict[str, Any], path: str) -> str:
    """`path`, or its section where the file lacks the key."""
    home, _, name = path.rpartition(".")
    section = at(data, home)
    return path if isinstance(section, dict) and name in section else home


def _needs_another(data: dict[str, Any], path: str, expected: str) -> bool:
    """Whether the key at `path` is fine alone, with the switch or the type of its section."""
    *sections, name = path.split(".")
    alone: dict[str, Any] = {}
    here, there = data, alone
    for section in sections:
        here = here.get(section, {})
        there[section] = {key: here[key] for key in ("enabled", "type", "device") if key in here}
        there = there[section]
    if name in here:
        there[name] = here[name]
    return path not in {problem.path for problem in examine(alone)[1] if problem.expected == expected}


def disagreements(files: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """One line for each file in which the two name other keys."""
    lines = []
    for name, data in files:
        here, there = squiggles(data), refused(data)
        if here != there:
            lines.append(f"{name}: only the schema {sorted(here - there)}, only check {sorted(there - here)}")
    return lines


@pytest.mark.skipif(not FILES, reason="the corpus is not here")
def test_on_the_configs_of_public_projects() -> None:
    files = []
    for path in FILES:
        try:
            files.append((path.name, read_config(path).data))
        except ConfigError:
            continue  # no JSON object: an editor's own concern
    assert len(files) > 200
    found = disagreements(files)
    assert not found, "\n".join(found)


def test_on_the_table_of_slips() -> None:
    files = [(key, {**GOOD, key: value}) for key, (value, _) in TOP_LEVEL.items()]
    for path, (value, _) in INSIDE.items():
        section, _, key = path.partition(".")
        files.append((path, {**GOOD, section: {**GOOD.get(section, {}), key: value}}))
    for key, cases in VALUES.items():
        for value, _ in cases:
            files.append((key, {"zero_optimization": {"stage": 3, key: value}} if "offload" in key else {key: value}))
    found = disagreements(files)
    assert not found, "\n".join(found)


def test_on_two_hundred_mutations() -> None:
    drawn = list(itertools.islice(mutations(), NUM_MUTATIONS))
    found = disagreements((f"{kind}: {what}", config) for kind, what, config, _ in drawn)
    assert len(drawn) == NUM_MUTATIONS and not found, "\n".join(found)


def test_both_accept_the_configs_before_the_mutations() -> None:
    for config in CONFIGS:
        load_config(config)
        assert not squiggles(config)
