"""Chooses which units stay gathered, so that the memory a plan leaves free saves the most communication.

Backward begins with every kept unit in memory, so a kept byte costs the same for every unit and for every duration. Its
value is the number of times it need not be sent:

    over the window             of n microbatches, 2n - 1 fewer gathers of a block: all but the first
    from forward to backward    n fewer gathers

The root and the last unit stay from forward to backward anyway, and backward does not read an embedding: n - 1 and 0 for
these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hf_dist.config import DistConfig, settled
from hf_dist.config.values import is_auto, memory_nbytes
from hf_dist.planning.memory_plan import MemoryPlan
from hf_dist.planning.planned_unit import PlannedUnit
from hf_dist.sharding.placement import Placement, Stay

AUTO_SHARE = 0.9
"""Share of the memory that "auto" finds, because fragmentation takes some and a plan is an estimate."""


def has_budget(config: DistConfig) -> bool:
    """Whether a budget decides which units stay gathered. The schedule zb_h1 keeps all of them anyway."""
    pipeline = config.pipeline
    return config.hf_dist.memory_budget is not None and (pipeline.stages == 1 or pipeline.schedule != "zb_h1")


def budget_nbytes(config: DistConfig, device: int | None) -> int | None:
    """Bytes of the budget; "auto" is a share of the `device` memory of a rank. None without a budget, or if it is unknown."""
    wanted = config.hf_dist.memory_budget
    if wanted is None or not has_budget(config):
        return None
    if is_auto(wanted):
        return None if device is None else int(AUTO_SHARE * device)
    return memory_nbytes(wanted)


def keep_within(plan: MemoryPlan, budget: int) -> MemoryPlan:
    """`plan` with units kept gathered while its peak is at most `budget` bytes; no unit if even that does not fit.

    Greedy: units that save the most gathers first; of equals the later unit, which is held for a shorter time. Units kept in
    `plan` are chosen again. Returns `plan` itself if weights are replicated.
    """
    if plan.states.placements.params is not Placement.SHARD:
        return plan
    stays = dict.fromkeys((unit.path for unit in plan.states.units), Stay.USE)
    chosen = replace(plan, states=plan.states.keeping(stays))
    for unit, stay in _candidates(plan):
        if stays[unit.path] is Stay.USE:
            tried = replace(plan, states=plan.states.keeping({**stays, unit.path: stay}))
            if tried.device_peak <= budget:
                stays[unit.path] = stay
                chosen = tried
    return chosen


def _candidates(plan: MemoryPlan) -> Iterator[tuple[PlannedUnit, Stay]]:
    """Every unit and how long it may stay, in order of decreasing value."""
    config, units = plan.states.config, plan.states.units
    count = settled(config.gradient_accumulation_steps) or 1
    pipelined = config.pipeline.stages > 1
    found = []
    for place, unit in enumerate(units):
        stays_anyway = not pipelined and unit in (units[0], units[-1])
        twice = unit.needed_in_backward and not stays_anyway
        found.append((count * (1 + twice) - 1 if count > 1 else 0, place, Stay.WINDOW))
        # A pipeline has several microbatches between forward and backward at a time, which is most of the window.
        found.append((count if twice and not pipelined else 0, place, Stay.BACKWARD))
    for saved, place, stay in sorted(found, reverse=True):
        if saved and units[place].nbytes:
            yield units[place], stay
