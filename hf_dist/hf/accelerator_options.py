"""What becomes of each option of accelerate's `Accelerator(...)`: honoured, or refused with what to use instead.

None is taken without effect, as half of them would be: the engine does what accelerate's wrappers do elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.comm_hook import asks_for_hook
from hf_dist.log import say_once

__all__ = ["HANDLERS", "OPTIONS", "check_options"]

HONOURED = ""
_ENGINE = "Remove it; dist_config says the same (a DeepSpeed JSON can be given)."
_COMPILE = 'Remove it, and set "compile": {"enabled": true} in dist_config, which compiles each block.'
_FLOAT8 = 'Remove it, and set "hf_dist": {"fp8": {"enabled": true}} in dist_config, or mixed_precision="fp8".'

OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"), _ENGINE),
    "torch_tp_plugin": 'Remove it, and set "tensor_parallel": {"autotp_size": ...} in dist_config.',
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), _COMPILE),
    **dict.fromkeys(
        (
            "device_placement",
            "split_batches",
            "mixed_precision",
            "gradient_accumulation_steps",
            "cpu",
            "dataloader_config",
        ),
        HONOURED,
    ),
    **dict.fromkeys(
        ("rng_types", "log_with", "project_dir", "project_config", "gradient_accumulation_plugin"), HONOURED
    ),
    **dict.fromkeys(("step_scheduler_with_optimizer", "kwargs_handlers", "parallelism_config"), HONOURED),
}
"""Parameter of `Accelerator` -> what to do instead; empty if it is honoured."""

HANDLERS: Mapping[str, str] = {
    "GradScalerKwargs": 'Remove it, and set "fp16": {"initial_scale_power": ..., "loss_scale_window": ...} in dist_config.',
    **dict.fromkeys(("AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs"), _FLOAT8),
    "TorchDynamoPlugin": _COMPILE,
    "DistributedDataParallelKwargs": HONOURED,  # a hook, by `comm_hook.py`
    **dict.fromkeys(
        ("AutocastKwargs", "InitProcessGroupKwargs", "ProfileKwargs", "GradientAccumulationPlugin"), HONOURED
    ),
}
"""Class of an entry of `kwargs_handlers` -> the same."""


def check_options(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that would have no effect. Local. `arguments`: keyword arguments of the script."""
    problems = [
        Problem(name, "", "starts another engine, or compiles what the engine cuts", OPTIONS[name])
        for name, value in arguments.items()
        if OPTIONS.get(name) and value is not None and str(value).lower() not in ("no", "dynamobackend.no")
    ]
    handlers: Sequence[object] = arguments.get("kwargs_handlers") or ()
    for handler in handlers:
        kind = type(handler).__name__
        if HANDLERS.get(kind):
            problems.append(
                Problem("kwargs_handlers", kind, "is for what accelerate wraps around a model", HANDLERS[kind])
            )
        elif kind == "DistributedDataParallelKwargs" and not asks_for_hook(handler):
            say_once(
                "DistributedDataParallelKwargs: unused parameters and buckets need no options here, so these have no effect"
            )
    if problems:
        raise ConfigError(problems)
