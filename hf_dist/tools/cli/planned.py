"""Shared by the plan commands: a model on meta, a config resolved as by a Trainer, files with suggestions."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_dist.config import (
    DistConfig,
    axes_of,
    hidden_size_of,
    load_config,
    resolve_without_trainer,
    with_elastic_batch,
)
from hf_dist.config.accelerate import put
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError, ModelError, Problem

__all__ = ["EXIT_DOES_NOT_FIT", "meta_model", "resolved_config", "row_tokens", "suggestions"]

EXIT_DOES_NOT_FIT = 3
"""The exit code of `hf-dist plan` if the memory is known and too small. 1 is an error, 2 a wrong command line."""

_TOKENS = 2048
"""Tokens of a row if the command line does not say."""
_MICRO, _STEPS, _TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def meta_model(model: str) -> Any:
    """The class named by the model's config, on meta, in the dtype of its weights."""
    import torch
    import transformers

    from hf_dist.hf.model_class import architecture_of, model_config, new_model

    config = model_config(model)
    name = architecture_of(config)
    try:
        with torch.device("meta"):
            return new_model(name if hasattr(transformers, name) else "AutoModelForCausalLM", config)
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"--model {model}: {name or 'its class'} cannot be created on meta: {error}") from error


def resolved_config(read: DistConfig, world_size: int, micro: int | None, model: Any) -> DistConfig:
    """The config as a Trainer would resolve it, as far as it affects memory. Unknown values get HF's defaults."""
    ranks = axes_of(read, world_size).size("data")
    changes: dict[str, tuple[Any, str]] = {"elasticity.enabled": (False, "plan")}
    read = with_elastic_batch(read, ranks)
    own = {path: read.value_at(path) for path in (_MICRO, _STEPS, _TRAIN)}
    own = {path: None if is_auto(value) else value for path, value in own.items()}
    micro = micro or own[_MICRO] or 1
    from_train = own[_TRAIN] // (micro * ranks) if own[_TRAIN] else 0
    steps = own[_STEPS] or from_train or 1
    changes |= {_MICRO: (micro, "file"), _STEPS: (steps, "file"), _TRAIN: (None, "plan")}
    for path in ("bf16.enabled", "fp16.enabled"):
        if is_auto(read.value_at(path)):
            changes[path] = (False, "plan")
    if is_auto(read.hf_dist.tiled_loss) or read.source_of("hf_dist.tiled_loss") == "default":
        changes["hf_dist.tiled_loss"] = (True, "plan")
    params = {} if read.optimizer is None else read.optimizer.params
    unknown = [f"optimizer.params.{key}" for key, value in params.items() if is_auto(value)]
    config = read.replaced(changes).without("scheduler", *unknown)
    return resolve_without_trainer(config, data_ranks=ranks, hidden_size=hidden_size_of(model.config), on_gpu=True)


def row_tokens(model: Any, asked: int | None) -> int:
    """Tokens of a row: `asked` with --seq, or as many as usual. Raises `ConfigError` if the model has fewer positions."""
    from hf_dist.planning.positions import positions_of

    most = positions_of(model)
    if asked is None:
        return _TOKENS if most is None else min(_TOKENS, most)
    if most is not None and asked > most:
        expected = f"tokens are more than the {most} positions of the model"
        raise ConfigError(Problem("--seq", str(asked), expected, f"Write {most} or less."))
    return asked


def suggestions(
    name: str, data: Mapping[str, object], folder: Path, found: Iterable[Mapping[str, object]]
) -> dict[Path, str]:
    """A file `name`_1.json, ... for each entry of `found`: `data` (as `canonical` gives it) with those values, by JSON path.

    Path -> text, which is a valid config.
    """
    kept = {key: value for key, value in data.items() if key != "$schema"}  # its path is relative to the original file
    files = {}
    for number, values in enumerate(found, start=1):
        changed = copy.deepcopy(kept)
        for path, value in values.items():
            put(changed, path, value)
        load_config(changed)
        files[folder / f"{name}_{number}.json"] = json.dumps(changed, indent=2) + "\n"
    return files
