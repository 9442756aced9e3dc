"""The stock Trainer with FSDP2 by accelerate."""

from __future__ import annotations

import os
from typing import Any

import accelerate.state
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainingArguments, training_args

from hf_dist.hf.model_class import model_class
from hf_dist.tools.bench.engines.loop import Engine, reduce_dtype
from hf_dist.tools.bench.engines.trainer import TrainerRun, arguments
from hf_dist.tools.bench.work import Contender, Work

__all__ = ["make"]


def make(work: Work, contender: Contender, rank: int) -> Engine:
    """Collective: every rank."""
    if work.device == "cpu":
        _shard_on_cpus()
    blocks = list(getattr(model_class(work.class_name), "_no_split_modules", None) or ())
    options: dict[str, object] = {"version": 2, "reshard_after_forward": True}
    if blocks:
        options |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": blocks}
    given: dict[str, Any] = {**arguments(work), "fsdp": True, "fsdp_config": options}
    args = TrainingArguments(**given)
    run = TrainerRun(work, Trainer, args)
    if work.bf16:

        def choose_dtypes(trainer: Any) -> None:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype(work))
            trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

        run.prepared = choose_dtypes
    return run


def _shard_on_cpus() -> None:
    """Make accelerate shard on CPUs, where accelerate 1.15 always chooses plain data parallelism: it sees GPUs instead.

    Applies to the whole process, which does nothing else.
    """
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    kind = accelerate.state.DistributedType.MULTI_GPU
    state: Any = accelerate.state.PartialState
    state._prepare_backend = lambda *args, **kwargs: ("gloo", kind)
    theirs: Any = training_args
    theirs.is_torch_bf16_gpu_available = lambda: True
