"""Configs from public projects: each loads and resolves, or ends in one ConfigError; nothing else is raised."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hf_dist.config import AutoSources, DistConfig, format_table, load_config, resolve
from hf_dist.errors import ConfigError

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*.json"))
pytestmark = pytest.mark.skipif(not FILES, reason="the corpus is not here")

# 257 files; 124 are refused. Why (the first reason of each):
#   86  offload to the host or to disk
#   16  optimizers: the 1-bit family, LAMB, bias_correction false, parameters beside "params"
#    8  compression
#    3  autotuning (2 of them with a list of stages to try)
#    3  a key in the wrong place, where it would be ignored
#    3  data efficiency, curriculum
#    3  pipeline, tensor and sequence parallelism
#    2  apex, MS-AMP
NUM_LOADING = 133


@cache
def outcomes() -> dict[str, DistConfig | ConfigError]:
    found: dict[str, DistConfig | ConfigError] = {}
    for path in FILES:
        try:
            found[path.name] = load_config(path)
        except ConfigError as error:
            found[path.name] = error
    return found


def test_at_least_as_many_configs_load_as_before() -> None:
    assert sum(isinstance(outcome, DistConfig) for outcome in outcomes().values()) >= NUM_LOADING


def test_every_problem_says_where_and_what() -> None:
    for name, outcome in outcomes().items():
        if isinstance(outcome, ConfigError):
            for problem in outcome.problems:
                assert problem.path and problem.expected and problem.file.rpartition(":")[2].isdigit(), (name, problem)
                assert problem.fix or problem.found, (name, problem)


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
