"""The arguments of a training script and the model's config file as sources for "auto", without importing either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_dist.config import AutoSources, hidden_size_of
from hf_dist.errors import ConfigError, Problem

__all__ = ["HF_DEFAULTS", "sources_from"]

HF_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "fp16": False,
    "bf16": False,
    "auto_find_batch_size": False,
}
"""TrainingArguments' defaults for values that a config can also set; used if script arguments are given."""

_NAMES = {**{name: name for name in HF_DEFAULTS}, "max_steps": "num_training_steps", "warmup_steps": "warmup_steps"}
_WORDS = ("lr_scheduler_type", "optim")


def sources_from(script: list[str] | None, data_ranks: int | None, model: str | None) -> AutoSources:
    """What is known without a run: the script's arguments, the number of data ranks, the model's width."""
    values: dict[str, Any] = {} if script is None else dict(HF_DEFAULTS)
    for name, text in _pairs(script or []):
        if name in _NAMES:
            values[_NAMES[name]] = _number(name, text, HF_DEFAULTS.get(name, 0))
        elif name in _WORDS:
            values[name] = text
    width = None if model is None else hidden_size_of(_model_config(model))
    return AutoSources(data_world_size=data_ranks or 1, hidden_size=width, **values)


def _pairs(script: list[str]) -> Iterator[tuple[str, str]]:
    """`--name value`, `--name=value` and `--name` as pairs. All other words belong to the script."""
    for index, word in enumerate(script):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            following = script[index + 1] if index + 1 < len(script) else "--"
            yield name, value if equals else "true" if following.startswith("--") else following


def _number(name: str, text: str, like: Any) -> object:
    """The value of an argument, in the type of its default."""
    if isinstance(like, bool):
        return text.lower() in ("true", "1", "yes")
    try:
        return type(like)(float(text))
    except ValueError:
        raise ConfigError(Problem(f"--{name}", text, "is not a number", "")) from None


def _model_config(model: str) -> SimpleNamespace:
    """The `config.json` of a folder or of a hub model, with nested objects as attributes."""
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download  # the network, or its cache

        try:
            path = Path(hf_hub_download(model, "config.json"))
        except Exception as error:
            fix = "Pass a folder that holds a config.json, or the ID of a model that can be reached."
            raise ConfigError(Problem("--model", model, f"has no config.json: {error}", fix)) from None
    loaded: SimpleNamespace = json.loads(path.read_text(encoding="utf-8"), object_hook=lambda d: SimpleNamespace(**d))
    return loaded
