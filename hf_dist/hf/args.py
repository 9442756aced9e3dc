"""TrainingArguments that take our JSON: `DistTrainingArguments`, and the mixin for SFTConfig and friends."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from hf_dist import failure
from hf_dist.config import AutoSources, DistConfig, load_config, resolve
from hf_dist.errors import ConfigError, Problem
from hf_dist.launch import detect_launch

CONFIG_VARIABLE = "HF_DIST_CONFIG"
_FOREIGN_ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")


@dataclass
class DistArgsMixin:
    """Put it before any TrainingArguments class: `class MyArgs(DistArgsMixin, SFTConfig)`, with `@dataclass`.

    `deepspeed="ds_config.json"` is taken as `dist_config`, without the deepspeed package; for scripts that cannot be
    edited the variable HF_DIST_CONFIG names the file. Without any of the three the class behaves like its base.
    """

    dist_config: str | None = field(
        default=None, metadata={"help": "DeepSpeed-style JSON: a path, JSON text, or (in Python) a dict."}
    )

    def __post_init__(self) -> None:
        deepspeed = getattr(self, "deepspeed", None)
        if deepspeed is not None or self.dist_config is not None or os.environ.get(CONFIG_VARIABLE):
            failure.install()  # before anything that can be wrong
        if deepspeed is not None and self.dist_config is not None and deepspeed != self.dist_config:
            raise ConfigError(
                Problem(
                    "deepspeed", repr(deepspeed), f"and dist_config={self.dist_config!r} are both given", "Keep one."
                )
            )
        source = self.dist_config if self.dist_config is not None else deepspeed
        source = source if source is not None else os.environ.get(CONFIG_VARIABLE) or None
        # HF's own path would import the deepspeed package and check its version.
        self.deepspeed: Any = None
        self.dist_config = source
        self._dist: DistConfig | None = None
        if source is None:
            super().__post_init__()  # type: ignore[misc]
            return
        _refuse_other_engines(self)
        config = load_config(source)
        _choose_hardware(self)
        super().__post_init__()  # type: ignore[misc]
        self._take_over(config)

    def _take_over(self, config: DistConfig) -> None:
        """Resolve what TrainingArguments know; mixed precision is ours from here on."""
        arguments: Any = self
        wanted = arguments.mixed_precision
        sources = AutoSources.from_training_arguments(arguments, data_world_size=arguments.world_size)
        sources = AutoSources(
            **{**vars(sources), "bf16": sources.bf16 or wanted == "bf16", "fp16": sources.fp16 or wanted == "fp16"}
        )
        arguments._dist = resolve(config, sources)
        # Weights are in the compute dtype: no autocast around forward, no GradScaler in accelerate.
        arguments.mixed_precision = "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if arguments.n_gpu > 1:  # plain `python` on a machine with several GPUs: one rank, never nn.DataParallel
            arguments._n_gpu = 1

    @property
    def dist(self) -> DistConfig | None:
        """The configuration, resolved as far as these arguments know; None when hf_dist is off."""
        return self._dist


@dataclass
class DistTrainingArguments(DistArgsMixin, TrainingArguments):
    """`transformers.TrainingArguments` with `dist_config`."""


def _refuse_other_engines(args: Any) -> None:
    problems = [
        Problem(name, os.environ[name], "starts another engine", "Use plain `accelerate launch` (or torchrun).")
        for name in _FOREIGN_ENGINES
        if os.environ.get(name, "").lower() in ("1", "true", "yes")
    ]
    if getattr(args, "fsdp", None):
        problems.append(
            Problem(
                "fsdp",
                repr(args.fsdp),
                "starts another engine",
                'Remove it; "zero_optimization": {"stage": 3} is FSDP.',
            )
        )
    if getattr(args, "torch_compile", False):
        problems.append(
            Problem("torch_compile", "True", "is not supported yet together with dist_config", "Remove it.")
        )
    if problems:
        raise ConfigError(problems)


def _choose_hardware(args: Any) -> None:
    """Let accelerate see the job that the launcher started.

    On a machine without accelerators accelerate takes each of several ranks for a single process unless it is told to use
    the CPU, and then every rank would train alone on the same data.
    """
    launch = detect_launch()
    if launch.world_size > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        args.use_cpu = True
