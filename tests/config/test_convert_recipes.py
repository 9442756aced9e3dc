"""`hf-dist config convert` of other tools' files: the layout keys become ours, every other key is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import load_config
from hf_dist.config.convert_recipes import from_any
from hf_dist.tools.cli import config as command

TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
[training]
local_batch_size = 1
seq_len = 8192
mixed_precision_param = "bfloat16"
enable_cpu_offload = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 2
expert_parallel_degree = 4
[activation_checkpoint]
mode = "full"
[compile]
enable = false
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: x, type: alpaca}]
micro_batch_size: 2
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
context_parallel_size: 2
fsdp_version: 2
fsdp_config:
  offload_params: true
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
"""
ZERO = "zero_optimization"
DISTRIBUTED: dict[str, Any] = {"tp_size": 2, "tp_plan": None, "enable_sequence_parallel": False}
DISTRIBUTED |= {"enable_expert_parallel": True, "fsdp_size": 4, "dp_replicate_size": 2, "fsdp_plan": {"lm_head": "x"}}
DISTRIBUTED |= {"fsdp_cpu_offload": True, "fsdp_mixed_precision": True, "pp_size": 1, "ep_size": 4, "ep_plan": None}
PLUGIN = {"fsdp_version": 2, "reshard_after_forward": False, "cpu_offload": {"offload_params": True}}
FILES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "titan.toml": (
        TITAN,
        {
            f"{ZERO}.stage": 3, f"{ZERO}.mics_shard_size": 8, f"{ZERO}.offload_param.device": "cpu", "pipeline.stages": 2,
            "pipeline.schedule": "interleaved_1f1b", "tensor_parallel.autotp_size": 2, "sequence_parallel_size": 2,
            "expert_parallel.autoep_size": 2, "bf16.enabled": True, "activation_checkpointing.every_n_layers": 1,
        },
        {"job.dump_folder", "model.name", "training.local_batch_size", "training.seq_len"},
    ),
    "axolotl.yaml": (
        AXOLOTL,
        {
            f"{ZERO}.stage": 3, f"{ZERO}.mics_shard_size": 8, f"{ZERO}.offload_param.device": "cpu",
            "tensor_parallel.autotp_size": 2, "sequence_parallel_size": 2,
        },
        {"base_model", "datasets", "micro_batch_size", "fsdp_config.state_dict_type", "fsdp_config.auto_wrap_policy"},
    ),
    "distributed.json": (
        json.dumps(DISTRIBUTED),
        {
            f"{ZERO}.stage": 3, f"{ZERO}.mics_shard_size": 4, f"{ZERO}.offload_optimizer.device": "cpu",
            "tensor_parallel.autotp_size": 2, "expert_parallel.autoep_size": 2, "bf16.enabled": True,
        },
        {"fsdp_plan"},
    ),
    "config.json": (
        json.dumps({"model_type": "llama", "distributed_config": {"fsdp_size": 2}}), {f"{ZERO}.stage": 3}, {"fsdp_size"},
    ),
    "plugin.json": (
        json.dumps({**PLUGIN, "mixed_precision_policy": {"param_dtype": "torch.bfloat16"}}),
        {f"{ZERO}.stage": 2, f"{ZERO}.offload_optimizer.device": "cpu", "bf16.enabled": True},
        {"fsdp_config.fsdp_version"},
    ),
    "accelerate.yaml": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\nparallelism_config: {tp_size: 2}",
        {f"{ZERO}.stage": 3, "tensor_parallel.autotp_size": 2}, set(),
    ),
}  # fmt: skip
"""A file, keys of the result, and names that are listed."""


@pytest.mark.parametrize("name", FILES)
def test_the_layout_of_a_file_is_converted_and_the_rest_listed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, expected, listed = FILES[name]
    (tmp_path / name).write_text(text)
    command.convert(tmp_path / name, None, None, None)
    printed = capsys.readouterr()
    config = load_config(json.loads(printed.out))
    assert {path: config.value_at(path) for path in expected} == expected
    named = {key for line in printed.err.splitlines() for key in line.partition(": ")[0].split(", ")}
    assert listed <= named, "each key is converted or listed"
    assert not named & {"parallelism.tensor_parallel_degree", "tp_size", "dp_shard_size"}


def test_sizes_that_the_file_leaves_open_are_named() -> None:
    made = from_any({"parallelism": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 2}})
    assert made.config[ZERO] == {"stage": 3}
    assert "mics_shard_size" in made.notes["parallelism.data_parallel_replicate_degree"]
    made = from_any({"tp_size": None, "tp_plan": "auto"})
    assert "autotp_size" in made.notes["tp_plan"] and "tensor_parallel" not in made.config
    made = from_any({"base_model": "m", "deepspeed": "zero2.json", "tensor_parallel_size": 2})
    assert made.config["tensor_parallel"] == {"autotp_size": 2} and "zero2.json" in made.notes["deepspeed"]
