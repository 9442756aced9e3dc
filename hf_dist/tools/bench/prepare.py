"""From the options to the work and its contenders. All errors are reported before a rank starts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_dist.config import DistConfig, axes_of, load_config, read_config
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError, ModelError, Problem, TopologyError
from hf_dist.hf.model_class import architecture_of, keep_layers, model_class, model_config, new_model, without_dropout
from hf_dist.model_config import text_config
from hf_dist.tools.bench.asked import Asked
from hf_dist.tools.bench.engines import ENGINES
from hf_dist.tools.bench.work import LEARNING_RATE, Batch, Contender, Work
from hf_dist.tools.check.data import microbatches

__all__ = ["Prepared", "device_and_ranks", "prepare"]

_IGNORED = -100
_DROPPED = ("train_batch_size", "scheduler", "$schema", "tensorboard", "wandb", "csv_monitor", "fp16", "bf16")
"""Sections of the user's files that the bench sets equally for all engines, or that do not affect a step."""


@dataclass(frozen=True)
class Prepared:
    """The runs to do."""

    work: Work
    contenders: list[Contender]
    skipped: list[str]
    """A line for each engine that is not installed."""


def prepare(asked: Asked, folder: Path, window: int | None = None) -> Prepared:
    """Write the model's config and the batches into `folder`. Raises `ConfigError`, `ModelError` or `TopologyError`.

    `window`: microbatches per step over all ranks, for engines that need not divide them over all ranks.
    """
    names = _engine_names(asked.engines)
    if asked.dtype not in ("fp32", "bf16"):
        raise ConfigError(
            Problem("--dtype", asked.dtype, "is not fp32 or bf16", "fp16 scales losses, each engine its way.")
        )
    files = [*asked.config, *asked.more]
    configs = {file: load_config(file) for file in files}
    device, ranks = device_and_ranks(asked.ranks)
    weights, class_name = _model(asked, folder)
    first = next(iter(configs.values()))
    reduce = first.communication_data_type or "fp32"
    facts: dict[str, Any] = {
        "folder": str(folder),
        "weights": weights,
        "class_name": class_name,
        "dtype": asked.dtype,
        "reduce_dtype": reduce if asked.dtype == "bf16" else "fp32",
        "ranks": ranks,
        "steps": asked.steps,
        "micro_batch": asked.micro_batch,
        "window": window or asked.accumulation * ranks,
        "clip": _clip(first),
        "device": device,
    }
    work = Work(**facts, tokens_per_step=0, unit="tokens")
    work = _with_batches(work, asked)
    contenders, skipped = [], []
    for name in names:
        python = asked.deepspeed_python or "" if name == "deepspeed" else ""
        missing = [package for package in ENGINES[name].needs if not _is_installed(package, python)]
        if missing:
            skipped.append(f"{name} is skipped: {' and '.join(missing)} not installed")
        elif ENGINES[name].takes_config:
            labels = _labels(files)
            for file, config in configs.items():
                if reason := _not_for(name, config):
                    skipped.append(f"{name} {labels[file]} is skipped: {reason}")
                else:
                    plain = _plain(file, config, work, name)
                    contenders.append(Contender(name, f"{name} {labels[file]}".strip(), plain, python))
        else:
            contenders.append(Contender(name, name, None, python))
    return Prepared(work, contenders, skipped)


def _engine_names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    problems = []
    for name in names:
        if name not in ENGINES:
            fix = did_you_mean(name, ENGINES, f"There are {', '.join(ENGINES)}.")
            problems.append(Problem("--engines", name, "is not an engine", fix))
    if problems or not names:
        fix = f"Name some of {', '.join(ENGINES)}."
        raise ConfigError(problems or Problem("--engines", repr(text), "names no engine", fix))
    return names


def device_and_ranks(asked: int | None) -> tuple[str, int]:
    """Device type and ranks: every GPU of the machine, or two processes of the CPU."""
    if not torch.cuda.is_available():
        return "cpu", asked or 2
    count = torch.cuda.device_count()
    if asked is not None and asked > count:
        raise TopologyError(
            f"--ranks {asked}: this machine has {count} GPUs. Use {count}, or hide them: CUDA_VISIBLE_DEVICES="
        )
    return "cuda", asked or count


def _model(asked: Asked, folder: Path) -> tuple[str, str]:
    """Write the config into `folder`; return where the weights are, and the class."""
    config = model_config(asked.model)
    name = architecture_of(config) or "AutoModelForCausalLM"
    shrunk = asked.num_layers is not None and keep_layers(config, asked.num_layers)
    without_dropout(config)
    config.use_cache = False
    config.save_pretrained(folder)
    local = Path(asked.model)
    has_weights = any(local.glob("*.safetensors")) if local.is_dir() else not shrunk
    return (asked.model if has_weights and not shrunk else ""), name


def _clip(config: DistConfig) -> float:
    clip = config.gradient_clipping
    return 1.0 if clip is None or is_auto(clip) else float(clip)


def _with_batches(work: Work, asked: Asked) -> Work:
    config = work.model_config
    model_class(work.class_name)  # raises its own error
    try:
        with torch.device("meta"):
            model = new_model(work.class_name, config)
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"--model {asked.model}: {work.class_name} cannot be created: {error}") from error
    count = work.total_steps * work.window
    path = None if asked.data == "synthetic" else Path(asked.data)
    if path is None and "ForCausalLM" in type(model).__name__:
        batches = _text(text_config(config).vocab_size, count, work.micro_batch, asked.seq)
    else:
        options: dict[str, Any] = {"path": path, "tokenizer": asked.model}
        batches = microbatches(model, rows=work.micro_batch, count=count, seq=asked.seq, **options)
    torch.save(batches, f"{work.folder}/batches.pt")
    per_step = sum(_size(batch) for batch in batches) / work.total_steps
    unit = "tokens" if "input_ids" in batches[0] else "samples"
    return replace(work, tokens_per_step=round(per_step), unit=unit)


def _text(vocabulary: int, count: int, rows: int, seq: int) -> list[Batch]:
    """Full rows without padding. Some words are much more frequent than others, so that the loss falls during training."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        drawn = torch.rand(rows, seq, generator=generator).pow(4).mul(vocabulary).long()
        batches.append({"input_ids": drawn, "labels": drawn})
    return batches


def _size(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    ids = batch.get("input_ids")
    return ids.numel() if ids is not None else next(iter(batch.values())).shape[0]


def _labels(files: list[Path]) -> dict[Path, str]:
    """Each file's name, with its folder if two names are equal."""
    if len(files) == 1:
        return {files[0]: files[0].name}
    names = Counter(file.name for file in files)
    return {file: file.name if names[file.name] == 1 else str(file) for file in files}


def _plain(file: Path, config: DistConfig, work: Work, engine: str) -> dict[str, object]:
    """The user's file with the work's batch, precision, optimizer and clipping."""
    plain: dict[str, Any] = json.loads(json.dumps(read_config(file).data))
    for key in (*_DROPPED, *(("hf_dist", "pipeline") if engine == "deepspeed" else ())):
        plain.pop(key, None)
    plain["train_micro_batch_size_per_gpu"] = work.micro_batch
    plain["gradient_accumulation_steps"] = work.window // _readers(file, config, work)
    plain["gradient_clipping"] = work.clip
    plain["bf16"] = {"enabled": work.bf16}
    if work.bf16:
        plain["communication_data_type"] = config.communication_data_type or "fp32"
    else:
        plain.pop("communication_data_type", None)
    params = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    plain["optimizer"] = {"type": "AdamW", "params": params}
    if engine != "deepspeed":
        plain["hf_dist"] = {**plain.get("hf_dist", {}), "save_on_signal": False}
    return plain


def _readers(file: Path, config: DistConfig, work: Work) -> int:
    """Number of ranks that read different rows. The other ranks read the same rows, so each has more microbatches."""
    readers = axes_of(config, work.ranks).size("data") if _shares_rows(config) else work.ranks
    if work.window % readers:
        what = f"shares {work.window} microbatches of a step out among {readers} data ranks"
        raise ConfigError(Problem("--accumulation", "", what, f"Make them a multiple of {readers}.", str(file)))
    return readers


def _shares_rows(config: DistConfig) -> bool:
    """Whether several ranks read the same rows."""
    slices, parts = config.tensor_parallel.autotp_size, config.sequence_parallel_size
    return config.pipeline.stages * slices * parts > 1


def _not_for(engine: str, config: DistConfig) -> str:
    """Why an engine cannot run a config; empty if it can."""
    if engine == "deepspeed" and _shares_rows(config):
        return "it reads other rows on every rank"
    if engine == "hf_dist_trainer" and config.pipeline.stages > 1:
        return "a step of a pipeline has no phases that a Trainer's hooks see"
    return ""


def _is_installed(package: str, python: str) -> bool:
    if not python:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], env=dict(os.environ), capture_output=True).returncode == 0
    except OSError as error:
        fix = "Pass the path of a Python interpreter."
        raise ConfigError(Problem("--deepspeed-python", python, f"cannot be run: {error}", fix)) from None
