"""Makes an hf_dist config from accelerate's YAML, the `fsdp` arguments of TrainingArguments, or those of an FSDP plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dist.config.accelerate import DEEPSPEED_KEYS, FP8_BACKENDS, fp8_backend_problem, put
from hf_dist.config.foreign_layout import ACCELERATE, SHARES, STAGE, ForeignLayout, keys_of, whole
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.support import SUPPORT
from hf_dist.errors import ConfigError, Problem

_ZERO = "zero_optimization"
_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")

_SHARDING: Mapping[str, int] = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
_SHARDING_NUMBERS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

_FOUND_BY_ITSELF = "units are found from the model's structure"
_NOT_NEEDED: Mapping[str, str] = {
    "auto_wrap_policy": _FOUND_BY_ITSELF,
    "transformer_layer_cls_to_wrap": _FOUND_BY_ITSELF,
    "min_num_params": _FOUND_BY_ITSELF,
    "state_dict_type": "every checkpoint holds full HF weights and training state for any layout",
    "use_orig_params": "parameters always stay the model's own",
    "sync_module_states": "every rank loads the same weights, and ranks are compared",
    "backward_prefetch": "prefetching is built in",
    "forward_prefetch": "prefetching is built in",
    "limit_all_gathers": "prefetching is built in",
    "version": "there is one engine",
    "transformer_cls_names_to_wrap": _FOUND_BY_ITSELF,
    "ignored_modules": "every parameter is sharded; a frozen one costs no gradient",
    "state_dict_config": "every checkpoint holds full HF weights and training state for any layout",
    "optim_state_dict_config": "every checkpoint holds full HF weights and training state for any layout",
    "param_init_fn": "weights are always loaded straight into the shards",
    "xla": "not for XLA devices",
}
_LAUNCHER = "stays with the launcher"
_LAUNCHER_KEYS = frozenset(
    {
        *("deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_inclusion_filter"),
        *("deepspeed_exclusion_filter", "deepspeed_config_file"),
    }
)
_CONSUMED = frozenset(
    {
        *("deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config", "mixed_precision"),
        *("num_machines", "num_processes", "distributed_type", "use_parallelism_config", "fp8_config"),
    }
)
_OF_THE_LAUNCHER = frozenset(
    {
        *("compute_environment", "debug", "enable_cpu_affinity", "gpu_ids", "machine_rank", "main_process_ip"),
        *("main_process_port", "main_training_function", "mpirun_config", "rdzv_backend", "same_network", "use_cpu"),
        *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "commands", "command_file", "downcast_bf16", "ipex_config"),
        *("tpu_name", "tpu_zone", "fsdp_backend", "log_dir", "num_cpu_threads_per_process"),
    }
)
_TEMPLATE = re.compile(r"\$\{|\{\{|^<.*>$")


_OF_FSDP = frozenset(
    {
        *("sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "activation_checkpointing"),
        *("mixed_precision_policy", "cpu_ram_efficient_loading", *_NOT_NEEDED),
    }
)
_DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


@dataclass
class Conversion:
    """The resulting config, and what happened to keys that are not in it."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Key of the source -> why it has no counterpart, or where it moved."""


def from_accelerate(data: Mapping[str, object]) -> Conversion:
    """Convert the content of an `accelerate config` YAML with a `deepspeed_config` or an `fsdp_config` section.

    Raises ConfigError if `deepspeed_config` names a `deepspeed_config_file`, because that file already is the config, and if
    the YAML has neither section. Template values are left out and listed.
    """
    result = Conversion({key: "auto" for key in _AUTO})
    data = _filled(data, "", result.notes)
    deepspeed, fsdp = (_section(data, name, result.notes) for name in ("deepspeed_config", "fsdp_config"))
    open_ones = {where.partition(".")[0] for where in result.notes}
    if not deepspeed and not fsdp and not open_ones & {"deepspeed_config", "fsdp_config"}:
        expected = 'is missing, and so is "fsdp_config"'
        raise ConfigError(Problem("deepspeed_config", "", expected, "Pass the YAML that `accelerate config` wrote."))
    if "deepspeed_config_file" in deepspeed:
        file = str(deepspeed["deepspeed_config_file"])
        fix = f"Check it with `hf-dist config check {file}`."
        raise ConfigError(Problem("deepspeed_config.deepspeed_config_file", file, "is the config already", fix))
    if deepspeed or "deepspeed_config" in open_ones:
        _deepspeed_section(deepspeed, result)
    else:
        machines, processes = (whole(data.get(key)) for key in ("num_machines", "num_processes"))
        _fsdp_section(fsdp, result, "fsdp_config.", processes // machines if machines > 1 else 0)
    _parallelism(data.get("parallelism_config"), result)
    _dynamo(data.get("dynamo_config"), result)
    precision = str(data.get("mixed_precision", "no")).lower()
    if precision in ("fp16", "bf16"):
        result.config[precision] = {"enabled": True}
    elif precision == "fp8":
        result.config["bf16"] = {"enabled": True}
        put(result.config, "hf_dist.fp8.enabled", True)
        _fp8_section(data.get("fp8_config"), result)
    elif precision not in ("no", "none"):
        result.notes["mixed_precision"] = f"{precision} is not available; bf16 is"
    for key in data:
        if key not in _CONSUMED:
            result.notes[key] = _LAUNCHER if key in _OF_THE_LAUNCHER else "not a key that is known here"
    return result


def _fp8_section(section: object, result: Conversion) -> None:
    """`fp8_config`: torchao's recipe by its own name; other libraries are refused."""
    options = section if isinstance(section, Mapping) else {}
    for key, value in options.items():
        if key == "backend" and str(value).upper() in FP8_BACKENDS:
            raise ConfigError(fp8_backend_problem("fp8_config.backend", str(value)))
        if key != "backend":
            result.notes[f"fp8_config.{key}"] = (
                "a detail of accelerate's recipe; hf_dist.fp8.recipe chooses one of torchao's"
            )


def _filled(node: object, path: str, notes: dict[str, str]) -> Any:
    """`node` without values that are unfilled templates."""
    if not isinstance(node, Mapping):
        return node
    kept = {}
    for key, value in node.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and _TEMPLATE.search(value):
            notes[where] = f"{value} is a template: fill it in, and convert again"
        else:
            kept[str(key)] = _filled(value, where, notes)
    return kept


def _section(data: Mapping[str, object], name: str, notes: Mapping[str, str]) -> Mapping[str, object]:
    """A section of the YAML; empty if missing."""
    if name in notes:
        raise ConfigError(Problem(name, "", "is a template", "Fill it in first."))
    section = data.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(Problem(name, str(section), "is not a section", "Write its keys below it, indented."))
    return section


def left_to_arguments() -> dict[str, Any]:
    """A config that leaves batches, clipping and precision to the Trainer's arguments."""
    return {**dict.fromkeys(_AUTO, "auto"), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def has_fsdp_names(data: Mapping[str, object]) -> bool:
    """Whether `data` holds the arguments of an FSDP plugin (or the Trainer's `fsdp_config`), and nothing else."""
    return bool(data) and {str(key).removeprefix("fsdp_") for key in data} <= _OF_FSDP


def _parallelism(section: object, result: Conversion) -> None:
    """Convert accelerate's sizes of axes."""
    sizes = {}
    for written, value in section.items() if isinstance(section, Mapping) else ():
        key = str(written).removeprefix("parallelism_config_")
        if key in ACCELERATE:
            sizes[key] = value
        else:
            result.notes[f"parallelism_config.{written}"] = "not a key that is known here"
    put_layout(result, ForeignLayout.read("parallelism_config", sizes, ACCELERATE), "parallelism_config.")


def put_layout(result: Conversion, layout: ForeignLayout, prefix: str) -> None:
    """Write the sizes of another tool into the config; `prefix` precedes their names in the notes."""
    stage = int(result.config.get(_ZERO, {}).get("stage", 0))
    keys = keys_of(layout, stage)
    stage = int(str(keys.get(STAGE, (stage, ""))[0]))
    result.notes |= {f"{prefix}{name}": why for name, why in layout.unused.items()}
    if "replicate" in layout.sizes and (stage < 3 or layout.size("shard") * layout.size("cp") == 1):
        keys.pop(SHARES, None)
        reason = "left out: it sets how many ranks share the shards of stage 3; below stage 3 every rank holds a copy"
        result.notes[prefix + layout.sizes["replicate"][1]] = reason
    elif "shard" in layout.sizes and "replicate" not in layout.sizes:
        result.notes[prefix + layout.sizes["shard"][1]] = "follows from the number of ranks"
    for path, (value, _) in keys.items():
        put(result.config, path, value)


def _dynamo(section: object, result: Conversion) -> None:
    """Convert accelerate's torch.compile settings."""
    for written, value in section.items() if isinstance(section, Mapping) else ():
        if str(written).removeprefix("dynamo_") == "backend":
            if str(value).lower() not in ("no", "none"):
                result.config["compile"] = {"enabled": True, "backend": str(value).lower()}
        else:
            result.notes[f"dynamo_config.{written}"] = "blocks are compiled in torch's default mode"


def from_fsdp_arguments(fsdp: str, fsdp_config: Mapping[str, object]) -> Conversion:
    """Convert `--fsdp "full_shard auto_wrap offload"` and the content of the `--fsdp_config` file; precision is "auto"."""
    result = Conversion(left_to_arguments())
    options = fsdp.replace(",", " ").split()
    known = (*(name.lower() for name in _SHARDING), "offload", "auto_wrap", "hybrid_shard_zero2", "true")
    for option in options:
        if option.lower() not in known:
            expected = f"is not one of {', '.join(known)}"
            raise ConfigError(Problem("fsdp", option, expected, did_you_mean(option, known)))
    section = dict(fsdp_config)
    sharding = [option for option in options if option.lower() not in ("offload", "auto_wrap", "true")]
    if sharding:
        section["sharding_strategy"] = sharding[0]
    if "offload" in options:
        section["offload_params"] = True
    if "auto_wrap" in options:
        section["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    _fsdp_section(section, result, "fsdp_config.", 0)
    return result


def _deepspeed_section(section: Mapping[str, Any], result: Conversion) -> None:
    result.config[_ZERO] = {"stage": 2}
    for key, value in section.items():
        path = DEEPSPEED_KEYS.get(key)
        if isinstance(value, str) and value.lower() == "none":
            continue
        if key == "zero3_init_flag":
            result.notes[key] = "weights are always loaded straight into the shards"
        elif key in _LAUNCHER_KEYS:
            result.notes[key] = _LAUNCHER
        elif key == "deepspeed_moe_layer_cls_names":
            put(result.config, str(path), [name.strip() for name in str(value).split(",")])
        elif path is not None:
            put(result.config, path, value)
        elif key in SUPPORT or any(known.startswith(f"{key}.") for known in SUPPORT):
            # accelerate ignores raw DeepSpeed sections in its YAML, but the user who wrote one meant it.
            both = isinstance(value, Mapping) and isinstance(result.config.get(key), dict)
            result.config[key] = {**result.config[key], **value} if both else value
            result.notes[key] = "taken over, though accelerate ignores it"
        else:
            result.notes[key] = "not a key that is known here"


def _fsdp_section(section: Mapping[str, object], result: Conversion, prefix: str, per_machine: int) -> None:
    """Convert FSDP's settings, with or without the `fsdp_` that accelerate puts before them."""
    zero = result.config.setdefault(_ZERO, {"stage": 3})
    for written, value in section.items():
        key, name = written.removeprefix("fsdp_"), f"{prefix}{written}"
        if key in ("sharding_strategy", "reshard_after_forward"):
            _sharding(value, zero, result, name, per_machine)
        elif key in ("offload_params", "cpu_offload"):
            if any(map(is_on, value.values() if isinstance(value, Mapping) else (value,))):
                zero["offload_param"] = zero["offload_optimizer"] = {"device": "cpu"}
        elif key == "activation_checkpointing":
            if is_on(value):
                put(result.config, "activation_checkpointing.every_n_layers", 1)
        elif key == "cpu_ram_efficient_loading":
            put(result.config, "hf_dist.lazy_load", is_on(value))
        elif key == "mixed_precision_policy":
            _precision(value, result, name)
        elif key.startswith("xla"):
            result.notes[name] = _NOT_NEEDED["xla"]
        elif key in _NOT_NEEDED:
            result.notes[name] = _NOT_NEEDED[key]
        else:
            result.notes[name] = "not a key that is known here"
    if zero["stage"] < 3 and "offload_param" in zero:
        del zero["offload_param"]
    if zero["stage"] == 0 and "offload_optimizer" in zero:
        del zero["offload_optimizer"]
        result.notes[f"{prefix}offload_params"] = "left out: every rank would offload all of it; use stage 1, 2 or 3"


def _precision(value: object, result: Conversion, name: str) -> None:
    """Convert the dtype of parameters, alone or in an object; gradients are always reduced in fp32."""
    text = str(value.get("param_dtype", "") if isinstance(value, Mapping) else value).removeprefix("torch.").lower()
    if text in _DTYPES:
        result.config[_DTYPES[text]] = {"enabled": True}
    elif text not in ("", "none", "no", "float32", "fp32"):
        result.notes[name] = f"{text} is not available; bf16 is"


def _sharding(value: object, zero: dict[str, object], result: Conversion, name: str, per_machine: int) -> None:
    """Convert a strategy by name or number, or the setting whether weights are freed after forward."""
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(_SHARDING_NUMBERS):
        text = _SHARDING_NUMBERS[int(text) - 1]
    if text in ("TRUE", "FALSE"):
        zero["stage"] = 3 if text == "TRUE" else 2
    elif text in _SHARDING:
        zero["stage"] = _SHARDING[text]
        if text == "HYBRID_SHARD":
            zero["mics_shard_size"] = per_machine or 8
            if not per_machine:
                result.notes[name] = "set zero_optimization.mics_shard_size to the processes of one machine"
    else:
        fix = f"Use one of {', '.join(_SHARDING)}."
        raise ConfigError(Problem(name, str(value), "has no counterpart", fix))


def is_on(value: object) -> bool:
    """Whether a value, also as a text, says yes."""
    return str(value).strip().lower() in ("true", "1", "yes")
