"""accelerate's `parallelism_config`, passed or exported by the launcher, as keys of the JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from hf_dist import DistTrainingArguments
from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.hf.parallelism import given_parallelism, with_parallelism


@pytest.mark.parametrize(
    ("given", "file", "expected"),
    [
        ({"cp_size": 4}, {}, {"sequence_parallel_size": 4}),
        ({"sp_size": 2}, {"sequence_parallel_size": 2}, {"sequence_parallel_size": 2}),
        (
            {"cp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2},
            {"zero_optimization": {"stage": 3}},
            {"sequence_parallel_size": 2, "zero_optimization.mics_shard_size": 4},
        ),
        ({"dp_shard_size": 8}, {}, {"sequence_parallel_size": 1, "zero_optimization.mics_shard_size": -1}),
    ],
)
def test_sizes_become_keys(given: dict[str, int], file: dict[str, Any], expected: dict[str, int]) -> None:
    config = with_parallelism(load_config(file), ParallelismConfig(**given))
    assert {path: config.value_at(path) for path in expected} == expected


def test_another_size_in_the_file_is_told() -> None:
    config = load_config({"sequence_parallel_size": 4})
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size: 4 is not 2, which parallelism_config asks for \(cp_size\)"
    ):
        with_parallelism(config, ParallelismConfig(cp_size=2))


def test_what_the_launcher_exports_is_taken_and_kept_from_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert given_parallelism(None).cp_size == 2
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"
    assert given_parallelism(None) is None


def test_the_arguments_of_a_trainer_take_it_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel_size: 2 does not divide the 1 processes"):
        DistTrainingArguments(
            str(tmp_path), use_cpu=True, dist_config={}, parallelism_config=ParallelismConfig(cp_size=2)
        )
    args = DistTrainingArguments(str(tmp_path), use_cpu=True, dist_config={}, parallelism_config=ParallelismConfig())
    assert args.parallelism_config is None
