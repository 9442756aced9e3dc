"""A model named on the command line: its class, and its config, optionally with fewer layers or without dropout."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from hf_dist.errors import ConfigError, Problem

__all__ = [
    "architecture_of",
    "keep_layers",
    "model_class",
    "model_config",
    "new_model",
    "told_config",
    "without_dropout",
    "without_dropout_modules",
]

_LAYER_KEYS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)


def model_config(model: str, *, said_by: str = "--model") -> Any:
    """The HF config of a folder or a hub ID. Raises `ConfigError`."""
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        fix = "Pass a folder that holds a config.json, or the ID of a model that can be reached."
        raise ConfigError(Problem(said_by, model, f"has no config that can be read: {error}", fix)) from None


def told_config(values: Mapping[str, Any], *, said_by: str) -> Any:
    """The HF config with these values of a config.json. Raises `ConfigError` for a model whose code is not in transformers."""
    kind = str(values.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        fix = "Name a folder with the model's config and code, which need no weights."
        raise ConfigError(Problem(said_by, "", f"is missing, and transformers knows no model {kind!r}", fix))
    return CONFIG_MAPPING[kind].from_dict(dict(values))


def architecture_of(config: object) -> str:
    """The name of the class that `config` was saved with; empty if unknown."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def model_class(name: str) -> Any:
    """The class named `module:Class`, or a class of transformers by its name. Raises `ConfigError`."""
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module or "transformers"), attribute)
    except (ImportError, AttributeError) as error:
        fix = 'Write --class "module:Class" with a module that can be imported from here.'
        raise ConfigError(Problem("--class", name, f"cannot be imported: {error}", fix)) from None


def new_model(name: str, config: object, **kwargs: object) -> Any:
    """A model of class `name` (see `model_class`) with new weights; inside `torch.device("meta")` without data."""
    cls = model_class(name)
    return cls.from_config(config, **kwargs) if name.startswith("Auto") else cls._from_config(config, **kwargs)


def keep_layers(config: object, count: int) -> bool:
    """Keep `count` layers in every part of the model that has more, and cut per-layer lists. Whether any were dropped."""
    changed = False
    for part in _parts(config):
        for key in _LAYER_KEYS:
            before = getattr(part, key, None)
            if isinstance(before, int) and before > count:
                setattr(part, key, count)
                changed = True
                for name, value in list(vars(part).items()):
                    if isinstance(value, list) and len(value) == before:
                        setattr(part, name, value[:count])
    return changed


def without_dropout(config: object) -> None:
    """Turn dropout off: ranks, one process and engines draw different random numbers, so results could not be compared."""
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            if ("drop" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)


def without_dropout_modules(model: nn.Module) -> None:
    """The same for modules whose rate no field of the config has: heads for tokens drop a tenth where it has none (Llama)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _parts(config: object) -> list[object]:
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "model_type")]
    return [config, *(part for value in inner for part in _parts(value))]
