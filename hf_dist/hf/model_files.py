"""The files of an HF or PEFT model, written as `save_pretrained` would and loaded in parts."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from hf_dist.checkpoint.check_names import refuse_unknown
from hf_dist.checkpoint.model_files import ModelFiles, loaded_dtypes, read_plan, read_weights, register, whole_shapes
from hf_dist.checkpoint.safetensors_header import files_of_index, read_header
from hf_dist.checkpoint.weight_plan import WEIGHTS, StoredTensor, WeightFile, WeightPlan
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError
from hf_dist.hf.naming import buffer_parts, weight_plan_for
from hf_dist.hf.saving import full_weights_here, full_weights_on_main, own_way
from hf_dist.hf.state_dict import loaded_dtype, write_dtype
from hf_dist.log import warn_once
from hf_dist.sharding.runtime import ShardedModel

_HF_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")


def hf_model_files(sharded: ShardedModel, max_shard_size: str | int) -> ModelFiles | None:
    """Names, dtypes and files of `model.save_pretrained`; None for a plain module, whose names are its parameters' names."""
    model: Any = sharded.model
    has_method = hasattr(model, "save_pretrained")
    if own_way(sharded):
        return _own_files(sharded, model.save_pretrained if has_method else functools.partial(_save_state, model))
    if not has_method:
        return None
    sharded.synchronize_buffers()
    return _files(
        sharded, max_shard_size, lambda folder: model.save_pretrained(folder, state_dict=_no_weights(sharded))
    )


register(hf_model_files)


def trainer_files(trainer: Any, engine: Engine, *, alone: bool = False) -> ModelFiles:
    """The files that the Trainer's `_save` writes: the model's files, tokenizer or processor, training arguments.

    `alone`: this rank holds the whole weights, and the call is local. Otherwise collective.
    """
    size = engine.config.checkpoint.max_shard_size
    if own_way(engine.sharded, trainer):
        return _own_files(engine.sharded, trainer._save, alone=alone)
    if not alone:
        engine.sharded.synchronize_buffers()
    return _files(
        engine.sharded, size, lambda folder: trainer._save(str(folder), state_dict=_no_weights(engine.sharded))
    )


def _no_weights(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The state dict for HF's functions, which write everything except weights: empty, or for PEFT names with empty tensors."""
    model: Any = sharded.whole
    if isinstance(model, PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False):
        return {}
    return {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}


def _save_state(model: torch.nn.Module, folder: str) -> None:
    """Write the state as HF's Trainer and accelerate do."""
    save_file(model.state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _own_files(sharded: ShardedModel, save: Callable[[str], None], *, alone: bool = False) -> ModelFiles:
    """Let the library's own code write everything, weights included."""
    everyone = functools.partial(full_weights_on_main, sharded, keep=sharded.mesh.world.rank == 0)
    weights = functools.partial(full_weights_here, sharded) if alone else everyone
    shapes = whole_shapes(sharded)
    return ModelFiles(None, write_small_files=lambda folder: save(str(folder)), shapes=shapes, with_weights=weights)


def _files(sharded: ShardedModel, max_shard_size: str | int, save: Any) -> ModelFiles:
    plan = weight_plan_for(sharded.whole, loaded_dtypes(sharded), max_shard_size)

    def small_files(folder: Path) -> None:
        # HF's function gets no weights and writes all other files. Its files for the missing weights are discarded.
        with tempfile.TemporaryDirectory(prefix=".small-", dir=folder) as scratch:
            with _no_progress_bar():
                save(scratch)
            # Moved one by one: to copy the tree would give the checkpoint the mode of a temporary folder, 0700.
            for path in [path for path in Path(scratch).rglob("*") if path.is_file()]:
                if not _HF_WEIGHTS.fullmatch(path.name):
                    place = folder / path.relative_to(scratch)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, place)
        write_dtype(folder, loaded_dtype(sharded))

    buffers = [replace(b, values=b.values.clone()) for b in buffer_parts(sharded.model, plan)]
    return ModelFiles(plan, buffers, small_files, _needed(sharded, plan))


def _needed(sharded: ShardedModel, plan: WeightPlan) -> dict[str, tuple[int, ...]]:
    """What the files must hold: everything the class does not omit; for a model under adapters, what PEFT selected."""
    model: Any = sharded.whole
    shapes = whole_shapes(sharded)
    if isinstance(model, PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False):
        return {name: shape for name, shape in shapes.items() if name not in (model._keys_to_ignore_on_save or ())}
    if not hasattr(model, "peft_config"):
        return shapes
    lost = [n for n, p in model.named_parameters() if p.requires_grad and n not in plan.by_param]
    if lost:
        warn_once(
            f"PEFT does not save {len(lost)} trained parameters of this model (the first is {lost[0]}), so they will be "
            "lost when it is loaded again. Name their modules in modules_to_save of the adapter's config."
        )
    return {}


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide HF's progress bar for weights, because there are none to write."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def load_weights(engine: Engine, folder: Path, plan: WeightPlan, names: set[str] | None = None) -> None:
    """Each rank reads its part of the weights (all, or `names`) of a folder that hf_dist wrote. Collective over dp.

    Raises `CheckpointError` on every rank when a parameter is missing or a file is damaged.
    """
    problem = None
    try:
        missing = read_weights(folder, plan, engine.sharded, names)
        adapters = not isinstance(engine.model, PreTrainedModel) or getattr(
            engine.model, "_hf_peft_config_loaded", False
        )
        if missing and not adapters:
            count = f"{len(missing)} parameters in all"
            problem = f"{folder} does not hold {min(missing)} ({count}): it was saved from another model"
    except (OSError, CheckpointError, KeyError) as error:
        problem = f"the weights in {folder} cannot be read ({type(error).__name__}: {error})"
    agree(engine.mesh.world, problem, CheckpointError)
    engine.sharded.weights_changed()


def plan_of_files(engine: Engine, folder: Path) -> WeightPlan | None:
    """Where the safetensors files in `folder`, of another program, hold the model's weights, under the names of
    `save_pretrained` (it splits experts, say, which the model holds as one tensor); None if they have other names. Local.

    Raises `CheckpointError` for tensors that the model does not have.
    """
    model: object = engine.sharded.whole
    adapters = getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None
    if not isinstance(model, PreTrainedModel) or adapters or own_way(engine.sharded):
        return None
    index = folder / f"{WEIGHTS}.index.json"
    names = files_of_index(index) if index.is_file() else {WEIGHTS}
    if not all((folder / name).is_file() for name in names):
        return None
    there = {
        tensor: (name, entry) for name in sorted(names) for tensor, entry in read_header(folder / name).tensors.items()
    }
    files: dict[str, list[StoredTensor]] = {}
    try:
        wanted = [t for file in weight_plan_for(model, loaded_dtypes(engine.sharded)).files for t in file.tensors]
    except CheckpointError:  # of a model that HF alone can write
        return None
    for tensor in wanted:
        name, entry = there.pop(tensor.name, ("", {}))
        if entry.get("shape") != list(tensor.shape):
            return None
        files.setdefault(name, []).append(tensor)
    refuse_unknown(model, there, folder)
    return WeightPlan(tuple(WeightFile.of(name, tensors) for name, tensors in files.items()))


__all__ = ["hf_model_files", "load_weights", "plan_of_files", "read_plan", "trainer_files"]
