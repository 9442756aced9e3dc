"""accelerate's `parallelism_config`, passed or exported by the launcher, as keys of the JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from hf_dist import DistTrainingArguments
from hf_dist.config import AutoSources, load_config, resolve
from hf_dist.config.distributed_config import distributed_layout
from hf_dist.config.foreign_layout import ForeignLayout
from hf_dist.errors import ConfigError
from hf_dist.hf.parallelism import given_parallelism, with_layout, with_parallelism


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


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"tp_size": None, "tp_plan": "auto", "fsdp_size": 2}, {"tp": 4, "shard": 2}),
        ({"enable_expert_parallel": True}, {"tp": 8, "ep": 8}),  # the class before it had sizes
        ({"enable_expert_parallel": True, "tp_size": 2}, {"tp": 2, "ep": 2}),
        ({"tp_size": None, "fsdp_size": 1, "pp_size": 2}, {"pp": 2}),
        ({"tp_size": 1, "tp_plan": {}}, {}),
    ],
)
def test_sizes_of_a_distributed_config(given: dict[str, Any], sizes: dict[str, int]) -> None:
    found = distributed_layout(given, 8)
    assert {axis: size for axis, (size, _) in found.sizes.items()} == sizes


def test_a_layout_turns_on_what_the_arguments_left_off_and_its_line_is_told(tmp_path: Path) -> None:
    layout = distributed_layout({"pp_size": 2, "ep_size": 2, "tp_size": 2}, 4)
    file = tmp_path / "config.json"
    file.write_text('{"pipeline":\n{"stages": 4}}')
    with pytest.raises(ConfigError, match=r"config.json:2: pipeline.stages: 4 is not 2, which distributed_config asks"):
        with_layout(load_config(file), layout)
    config = with_layout(load_config({}), distributed_layout({"dp_replicate_size": 1, "tp_size": 2}, 2))
    assert config.source_of("tensor_parallel.autotp_size") == "layout <- distributed_config.tp_size"
    mixed = ForeignLayout("distributed_config", {}, {"bf16.enabled": (True, "fsdp_mixed_precision")})
    config = resolve(with_layout(load_config({}), mixed), AutoSources(data_world_size=1, bf16=False, fp16=False))
    assert config.bf16.enabled is True


def test_arguments_follow_a_layout_that_the_job_can_hold(tmp_path: Path) -> None:
    args = DistTrainingArguments(str(tmp_path), use_cpu=True, dist_config={})
    args.follow(distributed_layout({"tp_size": 1}, 1))
    assert args.dist is not None and args.dist.tensor_parallel.autotp_size == 1
    with pytest.raises(ConfigError, match=r"tensor_parallel\.autotp_size: 2 does not divide the 1 processes"):
        args.follow(distributed_layout({"tp_size": 2}, 1))


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
