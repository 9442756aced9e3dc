"""Which units stay gathered: as much less on the wire as the memory that a plan leaves free is worth.

Backward begins when every kept unit is there, so a byte that is kept costs the same whichever unit it belongs to, and however
long it stays. What it is worth is how often it is then not sent:

    over the window             of n microbatches, 2n - 1 gathers less of a block: all but the first
    from forward to backward    n gathers less

The root and the last unit stay from forward to backward anyway, and backward does not read an embedding: n - 1 and 0 for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hf_dist.config import DistConfig, settled
from hf_dist.config.values import is_auto, memory_nbytes
from hf_dist.estimate.memory_plan import MemoryPlan
from hf_dist.estimate.state_bytes import PlannedUnit
from hf_dist.sharding.placement import Placement, Stay

AUTO_SHARE = 0.9
"""Of the memory that "auto" finds: fragments take some, and a plan is an estimate."""


def has_budget(config: DistConfig) -> bool:
    """Whether units stay gathered by a budget. The schedule zb_h1 needs them all anyway."""
    pipeline = config.pipeline
    return config.hf_dist.memory_budget is not None and (pipeline.stages == 1 or pipeline.schedule != "zb_h1")


def budget_nbytes(config: DistConfig, device: int | None) -> int | None:
    """Bytes of the key, "auto" being a share of the `device` memory of a rank; None for no budget, or one that is not known."""
    wanted = config.hf_dist.memory_budget
    if wanted is None or not has_budget(config):
        return None
    if is_auto(wanted):
        return None if device is None else int(AUTO_SHARE * device)
    return memory_nbytes(wanted)


def keep_within(plan: MemoryPlan, budget: int) -> MemoryPlan:
    """`plan` with the units that stay gathered while its peak is at most `budget` bytes; none where even that is too little.

    Greedy: what saves most gathers first, of equals the later unit, which is held for a shorter time. Whatever was kept in
    `plan` is chosen anew. The plan itself where weights rest replicated.
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
    """Every unit and how long it may stay, by falling value."""
    config, units = plan.states.config, plan.states.units
    count = settled(config.gradient_accumulation_steps) or 1
    pipelined = config.pipeline.stages > 1
    found = []
    for place, unit in enumerate(units):
        stays_anyway = not pipelined and unit in (units[0], units[-1])
        twice = unit.needed_in_backward and not stays_anyway
        found.append((count * (1 + twice) - 1 if count > 1 else 0, place, Stay.WINDOW))
        # Several microbatches of a pipeline are between forward and backward at a time: that is most of the window.
        found.append((count if twice and not pipelined else 0, place, Stay.BACKWARD))
    for saved, place, stay in sorted(found, reverse=True):
        if saved and units[place].nbytes:
            yield units[place], stay
