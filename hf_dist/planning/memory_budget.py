"""`hf_dist.memory_budget`: plans from the first training batch which units stay gathered, equally on all data ranks."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch

from hf_dist.config import DistConfig
from hf_dist.dist import collectives
from hf_dist.dist.raise_on_all_ranks import first_problem
from hf_dist.format_bytes import size_text
from hf_dist.log import say, warn_once
from hf_dist.planning.activations import Kept
from hf_dist.planning.describe import kept_units
from hf_dist.planning.memory_plan import MemoryPlan
from hf_dist.planning.residency import budget_nbytes, has_budget, keep_within
from hf_dist.planning.running import Running, memory_of, planned_config, planner_for
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.tensors import pytree


class MemoryBudget:
    """Chooses at the first training forward of an engine which units stay gathered."""

    def __init__(self) -> None:
        self.is_pending = True
        """Whether the first training forward is still to come."""
        self._planned: tuple[int, ...] | None = None  # shape of the microbatch for which units stay gathered

    @classmethod
    def of(cls, config: DistConfig, sharded: ShardedModel) -> MemoryBudget | None:
        """The budget of `config`; None without one, or if weights do not rest sharded."""
        return cls() if has_budget(config) and sharded.placements.params is Placement.SHARD else None

    def before_training(self, engine: Running, args: object, kwargs: object) -> None:
        """Plan at the first call, from its arguments: collective over dp. Later calls tell of larger microbatches. Local."""
        if self.is_pending:
            self.is_pending = False
            if _decide(engine, args, kwargs):
                self._planned = _shape(args, kwargs)
        elif self._planned is not None:
            _tell_larger(self._planned, _shape(args, kwargs))


def _tell_larger(planned: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Tell, on this rank, of a microbatch for which the plan does not hold. Local."""
    if math.prod(shape) > math.prod(planned):
        warn_once(
            f"hf_dist.memory_budget: what stays gathered was planned from a first microbatch of {planned}, and one of {shape} "
            "follows: the peak may be above the budget. Let the first batch have the longest rows, or give a smaller budget"
        )


def _shape(args: object, kwargs: object) -> tuple[int, ...]:
    """Of the tensor with most elements."""
    return max(
        (tuple(v.shape) for v in pytree.leaves((args, kwargs)) if isinstance(v, torch.Tensor)),
        key=math.prod,
        default=(),
    )


def _decide(engine: Running, args: object, kwargs: object) -> bool:
    """Set how long every unit stays gathered; returns whether any unit does. Collective over dp. The arguments are this rank's
    first microbatch."""
    sharded = engine.sharded
    mine: tuple[int | None, Kept | None, int] = (None, None, 0)
    plan, problem = None, ""
    try:
        plan = _plan(engine, args, kwargs)
        mine, problem = (budget_nbytes(engine.config, memory_of(engine)), plan.kept, plan.logits), plan.problem
    except Exception as error:  # on this rank alone, while the others wait for its result
        problem = f"{type(error).__name__}: {error}"
    first = first_problem(sharded.mesh.dp, problem)
    everyone = collectives.all_gather_object(sharded.mesh.dp, mine)
    budgets = [budget for budget, *_ in everyone if budget is not None]
    activations = [kept for _, kept, _ in everyone if kept is not None]
    if first is not None or plan is None or len(budgets) < len(everyone):
        reason = f"the model does not run on meta ({first[1]})" if first else "the memory of the machine is not known"
        say(f"hf_dist.memory_budget: no weights are kept gathered, because no peak can be planned: {reason}")
        return False
    names = [field.name for field in fields(Kept)]
    fullest = Kept(*(max(getattr(k, name) for k in activations) for name in names))
    plan = replace(plan, kept=fullest, logits=max(logits for _, _, logits in everyone))
    chosen = keep_within(plan, min(budgets))
    for unit in sharded.units:
        unit.stay = chosen.states.stays.get(unit.name, Stay.USE)
    say(_told(chosen, min(budgets)))
    return any(unit.stay is not Stay.USE for unit in sharded.units)


def _plan(engine: Running, args: Any, kwargs: Any) -> MemoryPlan:
    """What this rank's stage needs with no unit kept."""
    shapes = [v.shape for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()]
    micro = engine.batch.micro or (shapes[0][0] if shapes else 1)
    batch = {k: v for k, v in kwargs.items() if k != "labels"}  # the measurement uses no labels
    planner = planner_for(engine, micro, 0, args, batch)
    return planner.plan_rank(planned_config(engine, micro), engine.mesh.pp.rank)


def _told(plan: MemoryPlan, budget: int) -> str:
    peak, left = size_text(plan.device_peak), f"of a budget of {size_text(budget)}"
    if plan.device_peak > budget:
        return f"hf_dist.memory_budget: nothing is kept gathered: {peak} are planned without, {left}"
    return f"hf_dist.memory_budget: {kept_units(plan)}; planned peak {peak} {left}"
