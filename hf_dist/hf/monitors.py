"""Turns the monitor sections of the config into the Trainer's `report_to` and the reporters' environment variables."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


def report_to_monitors(config: DistConfig, args: Any) -> None:
    """Add the monitors that `config` enables to `args.report_to`. Existing values, also in the environment, stay.

    Raises ConfigError when the package of a monitor is not installed.
    """
    wanted = [name for name in _PACKAGES if getattr(config, name).enabled]
    problems = [
        Problem(f"{name}.enabled", "true", f"needs the package {name}", f"pip install {name}", config.at_line(name))
        for name in wanted
        if not any(importlib.util.find_spec(package) for package in _PACKAGES[name])
    ]
    if problems:
        raise ConfigError(problems)
    args.report_to = [*args.report_to, *(name for name in wanted if name not in args.report_to)]
    for variable, value in _variables(config).items():
        if value:
            os.environ.setdefault(variable, value)


def _variables(config: DistConfig) -> dict[str, str | None]:
    """The environment variables that configure HF's reporters."""
    found: dict[str, str | None] = {}
    board, wandb = config.tensorboard, config.wandb
    if board.enabled and board.output_path:
        found["TENSORBOARD_LOGGING_DIR"] = str(Path(board.output_path) / board.job_name)
    if wandb.enabled:
        found |= {"WANDB_PROJECT": wandb.project, "WANDB_ENTITY": wandb.team, "WANDB_RUN_GROUP": wandb.group}
    return found
