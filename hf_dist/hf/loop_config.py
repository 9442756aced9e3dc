"""The JSON in a custom loop: accelerate's objects fill and check the values that a Trainer's arguments would."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from accelerate import PartialState
from torch.utils.data import DataLoader

from hf_dist.config import DistConfig, LauncherSettings
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.args import CONFIG_VARIABLE, config_from_environment
from hf_dist.log import warn_once

_MICRO, _TRAIN, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"


def tell_rank_of_debug_launcher() -> None:
    """Set the variables that accelerate's `debug_launcher` leaves out: it tells only torch which process is which. Local."""
    if "ACCELERATE_DEBUG_RDV_FILE" in os.environ and "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(PartialState(cpu=True).process_index)


def named(given: object, launcher: LauncherSettings | None) -> Any:
    """The config the script gives, else the one named by HF_DIST_CONFIG or the launcher. Raises `ConfigError` without any."""
    source = given if given is not None else config_from_environment(launcher)
    if source is None:
        raise ConfigError(
            Problem(
                "dist_config",
                "",
                "is missing",
                f"Give DistAccelerator the path of a JSON, or name it in the variable {CONFIG_VARIABLE}.",
            )
        )
    return source


def take_accumulation(configured: object, arguments: dict[str, Any]) -> None:
    """Settle the number of microbatches per step. The JSON or the script may set it; both only if they agree."""
    plugin = arguments.get("gradient_accumulation_plugin")
    given = plugin.num_steps if plugin is not None else arguments.get("gradient_accumulation_steps")
    if not isinstance(configured, int):
        return
    if given is None:
        arguments["gradient_accumulation_steps"] = configured
    elif given != configured:
        raise ConfigError(
            Problem(
                "gradient_accumulation_steps",
                str(configured),
                f"differs from the {given} that the script gives its accelerator",
                'Set it to "auto", or remove it from the script.',
            )
        )


def without_trainer(config: DistConfig, accumulation: int) -> DistConfig:
    """`config` without the parts that belong to a Trainer. There "auto" means the script's own behaviour."""
    changes: dict[str, tuple[object, str]] = {}
    if config.optimizer is not None or config.scheduler is not None:
        warn_once(
            '"optimizer" and "scheduler" of the configuration have no effect in a loop with DistAccelerator: it uses those '
            "given to prepare(), unless these are accelerate's DummyOptim and DummyScheduler. The Trainer and "
            "hf_dist.initialize make them from the configuration."
        )
        config = config.without("optimizer", "scheduler")
    if not isinstance(config.gradient_clipping, (int, float)):
        changes["gradient_clipping"] = (0.0, "auto <- accelerator.clip_grad_norm_")
    if not isinstance(config.gradient_accumulation_steps, int):
        changes[_STEPS] = (accumulation, "auto <- Accelerator.gradient_accumulation_steps")
    return config.replaced(changes)


def micro_batch(objects: Iterable[object], num_shares: int) -> int | None:
    """Rows per rank of the first data loader in `objects`, whose batches are split into `num_shares`."""
    sizes = [obj.batch_size for obj in objects if isinstance(obj, DataLoader)]
    return sizes[0] // num_shares if sizes and sizes[0] is not None else None


def with_micro_batch(config: DistConfig, rows: int | None) -> DistConfig:
    """`config` with the batch size of the script's loader, or None while that is unknown. Raises `ConfigError`."""
    changes: dict[str, tuple[object, str]] = {}
    configured = config.train_micro_batch_size_per_gpu
    if not isinstance(configured, int):
        changes[_MICRO] = (rows, "auto <- DataLoader.batch_size")
    elif rows not in (None, configured):
        raise ConfigError(
            Problem(
                config.spelled(_MICRO),
                str(configured),
                f"differs from the {rows} rows per process of the first DataLoader given to prepare()",
                'Set it to "auto", or change the DataLoader.',
                config.at_line(_MICRO),
            )
        )
    if rows is None and not isinstance(config.train_batch_size, int):
        changes[_TRAIN] = (None, "the data loader")
    return config.replaced(changes)
