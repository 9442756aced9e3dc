"""Makes an hf_dist config from the layout keys of a recipe: torchtitan's TOML, Axolotl's YAML, a `DistributedConfig`.

A recipe holds much besides: data, model, rates. Those keys are listed, because the script or its arguments name them.
Source: torchtitan's `JobConfig` (sections `parallelism`, `training`, `activation_checkpoint`, `compile`), Axolotl's options for
N-D parallelism and FSDP, transformers 5.23 `DistributedConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dist.config.accelerate import put
from hf_dist.config.convert import (
    Conversion,
    from_accelerate,
    from_fsdp_arguments,
    has_fsdp_names,
    is_on,
    left_to_arguments,
    put_layout,
)
from hf_dist.config.distributed_config import distributed_layout, is_distributed_config
from hf_dist.config.foreign_layout import ForeignLayout, whole
from hf_dist.errors import ConfigError, Problem

__all__ = ["from_any"]

_ZERO = "zero_optimization"
_ELSEWHERE = "not a key of the layout: set it in the script or its arguments"
_TITAN_SIZES: Mapping[str, str] = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "data_parallel_shard_degree": "shard",
    "data_parallel_replicate_degree": "replicate",
}
_TITAN_SECTIONS = ("parallelism", "experimental", "training")
"""Sections that hold sizes; the last two in older recipes."""
_TITAN_SCHEDULES: Mapping[str, str] = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b"}
_PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16"}
_AXOLOTL_SIZES: Mapping[str, str] = {
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
    "expert_parallel_size": "ep",
    "dp_shard_size": "shard",
    "dp_replicate_size": "replicate",
}
_AXOLOTL_ONLY = frozenset({"base_model", "micro_batch_size", "tensor_parallel_size", "context_parallel_size"})


def from_any(data: Mapping[str, Any]) -> Conversion:
    """Convert the content of a file of another tool, which its keys tell. Raises `ConfigError` if none of them is known."""
    inside = data.get("distributed_config")
    if isinstance(inside, Mapping) or is_distributed_config(data):
        return _from_distributed_config(inside if isinstance(inside, Mapping) else data)
    if any(key in _TITAN_SIZES for name in _TITAN_SECTIONS for key in _section(data, name)):
        return _from_torchtitan(data)
    if data.keys() & _AXOLOTL_ONLY:
        return _from_axolotl(data)
    if has_fsdp_names(data):
        return from_fsdp_arguments("", data)
    return from_accelerate(data)


def _from_distributed_config(data: Mapping[str, Any]) -> Conversion:
    result = Conversion(left_to_arguments())
    put_layout(result, distributed_layout(data, None), "")
    return result


def _from_torchtitan(data: Mapping[str, Any]) -> Conversion:
    result = Conversion(left_to_arguments())
    sizes: dict[str, Any] = {}
    rest: list[str] = []
    for name, section in data.items():
        if not isinstance(section, Mapping):
            rest.append(name)
            continue
        for key, value in section.items():
            if key in _TITAN_SIZES and name in _TITAN_SECTIONS:
                sizes[key] = value
            elif not _titan_key(result, f"{name}.{key}", value):
                rest.append(f"{name}.{key}")
    _titan_experts(sizes, _section(data, "parallelism"), result)
    shard = sizes.get("data_parallel_shard_degree", -1)
    reshard = str(_section(data, "parallelism").get("fsdp_reshard_after_forward", "default"))
    if str(shard) == "-1" or whole(shard) > 1:
        put(result.config, f"{_ZERO}.stage", 2 if reshard == "never" else 3)
        if is_on(_section(data, "training").get("enable_cpu_offload", False)):
            for part in ("offload_param", "offload_optimizer") if reshard != "never" else ("offload_optimizer",):
                put(result.config, f"{_ZERO}.{part}", {"device": "cpu"})
    layout = ForeignLayout.read("parallelism", sizes, _TITAN_SIZES)
    if str(shard) == "-1" and layout.size("replicate") > 1 and reshard != "never":
        reason = "set zero_optimization.mics_shard_size to the ranks of one copy: data_parallel_shard_degree is -1"
        result.notes["parallelism.data_parallel_replicate_degree"] = reason
        sizes.pop("data_parallel_replicate_degree")
        layout = ForeignLayout.read("parallelism", sizes, _TITAN_SIZES)
    put_layout(result, layout, "parallelism.")
    _list(result, rest)
    return result


def _titan_key(result: Conversion, path: str, value: Any) -> bool:
    """Convert one key that is no size; False if it has no counterpart in a layout."""
    text = str(value).lower()
    if path in ("parallelism.fsdp_reshard_after_forward", "training.enable_cpu_offload"):
        return True  # read with the sizes
    if path == "training.mixed_precision_param":
        if text in _PRECISIONS:
            result.config[_PRECISIONS[text]] = {"enabled": True}
        return True
    if path == "activation_checkpoint.mode":
        if text != "none":
            put(result.config, "activation_checkpointing.every_n_layers", 1)
        if text == "selective":
            result.notes[path] = "taken as full: each block is recomputed"
        return True
    if path in ("compile.enable", "training.compile"):
        if is_on(value):
            result.config["compile"] = {"enabled": True}
        return True
    if path.endswith(".pipeline_parallel_schedule"):
        _titan_schedule(result, path, text)
        return True
    return False


def _titan_schedule(result: Conversion, path: str, text: str) -> None:
    schedule = _TITAN_SCHEDULES.get(text)
    if schedule is None:
        result.notes[path] = f"{text} is not one of gpipe, 1f1b, interleaved_1f1b, zb_h1; 1f1b is the default"
        return
    put(result.config, "pipeline.schedule", schedule)
    if schedule == "interleaved_1f1b":
        put(result.config, "pipeline.virtual_stages", 2)
        result.notes[path] = "pipeline.virtual_stages is written as 2: change it to the number of stages on each rank"


def _titan_experts(sizes: dict[str, Any], section: Mapping[str, Any], result: Conversion) -> None:
    """With `expert_tensor_parallel_degree`, ranks of `tp` cut experts, and `expert_parallel_degree` counts the others."""
    cut = whole(section.get("expert_tensor_parallel_degree"))
    if cut > 1 and "expert_parallel_degree" in sizes:
        sizes["expert_parallel_degree"] = whole(sizes["expert_parallel_degree"]) * cut


def _from_axolotl(data: Mapping[str, Any]) -> Conversion:
    fsdp, section = data.get("fsdp") or "", data.get("fsdp_config") or {}
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp) if fsdp is not True else ""
    layout = ForeignLayout.read("", data, _AXOLOTL_SIZES, shards_weights=True)
    file = data.get("deepspeed")
    if file and not layout.sizes:
        fix = f"Check it with `hf-dist config check {file}`."
        raise ConfigError(Problem("deepspeed", str(file), "is the config already", fix))
    if words or section or data.get("fsdp_version"):
        result = from_fsdp_arguments(words, section)
    else:
        result = Conversion(left_to_arguments())
    if file:
        result.notes["deepspeed"] = f"{file} is a config already: write the keys above into it"
    put_layout(result, layout, "")
    known = {*_AXOLOTL_SIZES, "fsdp", "fsdp_config", "fsdp_version", "deepspeed", "bf16", "fp16", "torch_compile"}
    if is_on(data.get("torch_compile", False)):
        result.config["compile"] = {"enabled": True}
    _list(result, [str(key) for key in data if key not in known])
    return result


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _list(result: Conversion, rest: list[str]) -> None:
    """Keys that are not converted, in one note."""
    if rest:
        result.notes[", ".join(rest)] = _ELSEWHERE
