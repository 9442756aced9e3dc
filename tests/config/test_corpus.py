"""Configs from public projects: each loads and resolves, or ends in one ConfigError; no key is dropped in silence."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import AutoSources, DistConfig, format_table, load_config, read_config, resolve
from hf_dist.config.findings import Findings
from hf_dist.config.normalise import normalised
from hf_dist.config.rows import Status, is_off
from hf_dist.config.support import SUPPORT
from hf_dist.errors import ConfigError, Problem

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*.json"))
pytestmark = pytest.mark.skipif(not FILES, reason="the corpus is not here")

LATER = "is not available yet"
OUT_OF_SCOPE = ("not supported",)
MAX_OUT_OF_SCOPE = 0.05
"""Largest share of the files of user projects that is refused for what a row of the table rules out."""
MAX_REFUSED = 0.06
"""Largest share of those that is refused, whatever for, but for features that are to come."""


@cache
def outcomes() -> dict[str, DistConfig | ConfigError]:
    found: dict[str, DistConfig | ConfigError] = {}
    for path in FILES:
        try:
            found[path.name] = load_config(path)
        except ConfigError as error:
            found[path.name] = error
    return found


@cache
def vendor_files() -> frozenset[str]:
    """Files of DeepSpeed's and accelerate's own repositories: examples and tests of single features."""
    with (CORPUS / "INDEX.tsv").open() as index:
        return frozenset(row["file"] for row in csv.DictReader(index, delimiter="\t") if row["vendor"] == "True")


def kind_of(outcome: DistConfig | ConfigError) -> str:
    """Loads; refused until a feature exists; refused for good; or wrong in itself, wherever it is read."""
    if isinstance(outcome, DistConfig):
        return "loads"

    def matches(problem: Problem, *words: str) -> bool:
        return any(word in problem.expected for word in words)

    if all(matches(problem, LATER) for problem in outcome.problems):
        return "not yet"
    if all(matches(problem, LATER, *OUT_OF_SCOPE) for problem in outcome.problems):
        return "out of scope"
    return "mistake in the file"


def test_few_configs_are_refused_and_the_counts_are_printed() -> None:
    kinds = {name: kind_of(outcome) for name, outcome in outcomes().items()}
    users = {name: kind for name, kind in kinds.items() if name not in vendor_files()}
    print(f"\nall {len(kinds)} files: {dict(Counter(kinds.values()))}")
    print(f"the {len(users)} of user projects: {dict(Counter(users.values()))}")
    for name, kind in kinds.items():
        outcome = outcomes()[name]
        if kind in ("out of scope", "mistake in the file") and isinstance(outcome, ConfigError):
            what = "; ".join(f"{problem.path} {problem.expected}"[:70] for problem in outcome.problems[:2])
            print(f"  {kind:<20} {name}: {what}")
    assert Counter(kinds.values())["loads"] >= 239
    assert sum(kind not in ("loads", "not yet") for kind in users.values()) <= MAX_REFUSED * len(users)
    assert Counter(users.values())["out of scope"] <= MAX_OUT_OF_SCOPE * len(users)
    assert Counter(kinds.values())["mistake in the file"] <= 6


def test_every_problem_says_where_and_what() -> None:
    for name, outcome in outcomes().items():
        if isinstance(outcome, ConfigError):
            for problem in outcome.problems:
                assert problem.path and problem.expected and problem.file.rpartition(":")[2].isdigit(), (name, problem)
                assert problem.fix or problem.found, (name, problem)


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that holds no other keys, with its value; arguments of optimizers and schedules too."""
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, where)
        else:
            yield where, value


def is_accounted_for(config: DistConfig, data: dict[str, Any], path: str, value: Any) -> bool:
    """Whether a key of the file was read, listed, or asks for what happens anyway."""
    if path in config.sources:
        return True
    heads = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
    noted = {note.path for note in config.notes}
    if any(head in noted or config.spelled(head) in noted for head in heads):
        return True
    for head in heads:
        row, section = SUPPORT.get(head), data
        for part in head.split("."):
            section = section.get(part, {}) if isinstance(section, dict) else {}
        if row is not None and row.status is not Status.USED and row.accepted(section):
            return True
        if isinstance(section, dict) and "enabled" in section and is_off(section["enabled"]):
            return True
    return False


def test_no_key_of_a_config_that_loads_is_dropped_in_silence() -> None:
    dropped = []
    for path in FILES:
        config = outcomes()[path.name]
        if isinstance(config, DistConfig):
            data = normalised(read_config(path).data, Findings())
            for key, value in leaves(data):
                if value is not None and not is_accounted_for(config, data, key, value):
                    dropped.append(f"{path.name}: {key} = {value!r}")
    assert not dropped, "\n".join(dropped)


def test_what_loads_also_resolves_or_disagrees_with_the_arguments_in_words() -> None:
    sources = AutoSources(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
        learning_rate=5e-5,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        fp16=False,
        bf16=False,
        warmup_steps=1,
        num_training_steps=100,
        hidden_size=64,
    )
    resolved = 0
    for outcome in outcomes().values():
        if isinstance(outcome, DistConfig):
            try:
                config = resolve(outcome, sources, final=True)
            except ConfigError as error:
                words = ("differs from", "is not train_micro_batch_size_per_gpu")
                assert all(any(word in problem.expected for word in words) for problem in error.problems)
                continue
            resolved += 1
            assert "auto" not in [config.value_at(path) for path in config.sources]
            assert format_table(config).startswith("Configuration from ")
    assert resolved >= 30
