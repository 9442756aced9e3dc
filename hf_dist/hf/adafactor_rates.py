"""The learning rates that HF's Adafactor chooses itself, for HF's schedule that shows them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.engine.engine import Engine
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.raw_calls import engine_of

__all__ = ["let_adafactor_show_rates"]

_STOCK = "_hf_dist_stock_get_lr"


def let_adafactor_show_rates(engine: Engine) -> None:
    """Make HF's `AdafactorSchedule`, which shows the rates that its optimizer has chosen, find them on their owners.

    HF's reads the gradient and the state of each group's first parameter after the step. Here the gradient is gone by then, and
    one rank has the state; the rate would be 0, or that of another parameter. Local; a step of such a schedule is collective.
    """
    loaded = sys.modules.get("transformers.optimization")  # a script that does not use it need not wait for its import
    schedule: Any = getattr(loaded, "AdafactorSchedule", None)
    if schedule is not None and not hasattr(schedule, _STOCK):
        setattr(schedule, _STOCK, schedule.get_lr)
        schedule.get_lr = _rates


def _rates(schedule: Any) -> object:
    engine: Any = engine_of(schedule.optimizer)
    if engine is None or engine.fragments is None:
        return getattr(schedule, _STOCK)()
    rates = torch.tensor(_own_rates(engine.fragments), dtype=torch.float64, device=engine.device)
    collectives.all_reduce(engine.mesh.world, rates, op="max").wait()
    return [rate for rate in rates.tolist() if rate >= 0] or schedule.base_lrs


def _own_rates(fragments: Optimizers) -> list[float]:
    """The last rate of each param group's first parameter; -1 if another rank steps it, or none has yet."""
    optimizer: Any = fragments.optimizer
    states = {f.name: optimizer.state.get(f.tensor) for f in fragments.fragments}
    firsts = [states.get(names[0]) if names else None for names in fragments.param_names]
    groups = zip(optimizer.param_groups, firsts, strict=True)
    return [float(optimizer._get_lr(group, state)) if state else -1.0 for group, state in groups]
