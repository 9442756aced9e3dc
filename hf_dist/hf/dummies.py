"""accelerate's `DummyOptim` and `DummyScheduler`, with which a script leaves optimizer and schedule to the JSON.

Values of the JSON win. "auto" takes the value given to the dummy. Source: accelerate `Accelerator._prepare_deepspeed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import utils
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from hf_dist.config import DistConfig
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError, Problem
from hf_dist.optim.build import build_optimizer, optimizer_for
from hf_dist.optim.schedules import build_scheduler

__all__ = ["DummyOptim", "DummyScheduler", "real_optimizer", "real_scheduler"]

for _dummy in (DummyOptim, DummyScheduler):  # accelerate exports them only if the deepspeed package is installed
    if not hasattr(utils, _dummy.__name__):
        setattr(utils, _dummy.__name__, _dummy)


def real_optimizer(dummy: DummyOptim, config: DistConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the JSON section over the parameters of `dummy` (parameters of `model`, in the script's groups). Local.

    Raises `ConfigError` if the section is missing or no optimizer can be made from it.
    """
    section = config.optimizer
    if section is None:
        raise ConfigError(_missing("optimizer", "DummyOptim", "a torch optimizer"))
    params = _filled(section.params, {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs})
    groups = list(dummy.params)
    if section.type == "Muon":  # it sorts the model's parameters by name
        return optimizer_for(model, section.type, params)
    return build_optimizer(section.type, params, groups)


def real_scheduler(
    dummy: DummyScheduler, config: DistConfig, optimizer: Any, *, ranks: int, options: Mapping[str, object]
) -> AcceleratedScheduler:
    """The schedule of the JSON section on a prepared `optimizer`, or the result of `lr_scheduler_callable`. Local.

    It steps once per optimizer step, as in DeepSpeed's engine. `ranks`: number of processes that read different rows.
    Scripts count `total_num_steps` before their loader is split over ranks, unless `options["split_batches"]`.
    """
    section, plain = config.scheduler, optimizer.optimizer
    if section is not None:
        total = dummy.total_num_steps
        if total is not None and not options["split_batches"]:
            total = math.ceil(total / ranks)
        rate = plain.defaults.get("lr")
        given = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "total_num_steps": total}
        given["warmup_num_steps"] = max(1, dummy.warmup_num_steps)  # zero means one step, as in accelerate
        scheduler = build_scheduler(section.type, _filled(section.params, given), plain)
    elif dummy.lr_scheduler_callable is not None:
        scheduler = dummy.lr_scheduler_callable(plain)
    else:
        raise ConfigError(_missing("scheduler", "DummyScheduler", "lr_scheduler_callable, or a torch scheduler"))
    return AcceleratedScheduler(scheduler, [optimizer], **{**options, "split_batches": True})


def _filled(params: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """`params` with each "auto" replaced by the given value. A key without a given value is dropped, for the class default."""
    filled = {key: given.get(key) if is_auto(value) else value for key, value in params.items()}
    return {key: value for key, value in filled.items() if value is not None}


def _missing(section: str, dummy: str, instead: str) -> Problem:
    return Problem(
        section, "", f"is missing, and {dummy} stands for it", f"Add the section, or give prepare() {instead}."
    )
