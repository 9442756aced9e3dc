"""A model named on the command line: its config, and the class that the config or the user names."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import AutoConfig

from hf_dist.errors import ConfigError, Problem

__all__ = ["architecture_of", "model_class", "model_config"]


def model_config(model: str) -> Any:
    """The HF config of a folder or an ID of the hub. Raises `ConfigError`."""
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        fix = "Pass a folder that holds a config.json, or the ID of a model that can be reached."
        raise ConfigError(Problem("--model", model, f"has no config that can be read: {error}", fix)) from None


def architecture_of(config: Any) -> str:
    """The name of the class that was saved with `config`; empty if it does not say."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def model_class(name: str) -> Any:
    """`module:Class`, or a class of transformers by its name. Raises `ConfigError`."""
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module or "transformers"), attribute)
    except (ImportError, AttributeError) as error:
        fix = 'Write --class "module:Class" with a module that can be imported from here.'
        raise ConfigError(Problem("--class", name, f"cannot be imported: {error}", fix)) from None
