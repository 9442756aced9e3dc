"""Which setting helps: plans every single change, and finds the cheapest combinations that fit.

Cheap means little lost time. The price of a change is a rough percentage of the step, on a GPU with sequence lengths of
fine-tuning. Only the order matters:

    tiled loss                      1   the same matrix products, in pieces
    ZeRO stage 1, 2                 0, 2   the same bytes as stage 0; more reductions with accumulation
    ZeRO stage 3                   10   50% more bytes
    smaller microbatches, halved    5   each time: smaller matrices, more gathers at stage 3
    rows over twice the ranks      15   each time: exchanges in every attention, more microbatches
    gradient checkpointing         30   a second forward
    block inputs on the host        5   additional: copies beside the computation
    optimizer on the host          60   a step on the CPU; gradients and weights cross the bus
    weights on the host            90   every gather crosses the bus
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dist.config import DistConfig, axes_of, settled
from hf_dist.errors import HfDistError
from hf_dist.memory.activation.checkpoint import asks_for_checkpointing
from hf_dist.planning.memory_plan import Limits, MemoryPlan
from hf_dist.planning.planner import Planner

_ZERO = "zero_optimization"
_STAGE_PRICES = {0: 0, 1: 0, 2: 2, 3: 10}
_TILES, _HALVED, _SHARED, _AGAIN, _ON_HOST, _OPTIMIZER, _WEIGHTS = 1, 5, 15, 30, 5, 60, 90
MAX_HALVINGS = 3
_LONG = 16384
"""Tokens from which sharing a row over ranks is worthwhile."""


@dataclass(frozen=True)
class Change:
    """Settings that differ from a config, by JSON path."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    price: int = 0

    def of(self, config: DistConfig) -> DistConfig:
        """`config` with these settings."""
        return config.replaced({path: (value, "plan") for path, value in self.values.items()})

    def __add__(self, other: Change) -> Change:
        text = ", ".join(part for part in (self.text, other.text) if part)
        return Change(text, {**self.values, **other.values}, self.price + other.price)


@dataclass(frozen=True)
class Tried:
    """A change and its effect on the plan."""

    change: Change
    plan: MemoryPlan
    saved: int
    """Bytes saved on the device; negative if it needs more."""


def single_changes(planner: Planner, config: DistConfig) -> list[Change]:
    """Single settings that may help and are compatible with `config`."""
    zero = config.zero_optimization
    shards = axes_of(config, planner.world_size).size("shard")
    changes = [_stage(s) for s in range(zero.stage + 1, 4) if shards > 1]
    if zero.stage > 0 and zero.offload_optimizer.device == "none":
        changes.append(_OFFLOADS["optimizer"])
    if zero.stage == 3 and zero.offload_param.device == "none":
        changes.append(Change("offload weights", {f"{_ZERO}.offload_param.device": "cpu"}, _WEIGHTS))
    if not (planner.workload.checkpointing or asks_for_checkpointing(config)[0]):
        changes.append(_CHECKPOINTING)
    changes += _shared(planner, config)[1:2]
    if not settled(config.hf_dist.tiled_loss):
        changes.append(_TILED)
    stages = config.pipeline.stages * 2
    changes.append(Change(f"pipeline stages {stages}", {"pipeline.stages": stages}))  # skipped later if impossible
    return changes + [c for c in _smaller(planner, config) if c.text and c.values][:1]


def try_each(planner: Planner, config: DistConfig, limits: Limits) -> list[Tried]:
    """Every single change, most helpful first: fewest missing bytes, then fewest bytes on the device."""
    now = planner.plan(config)
    tried = list(_planned(planner, config, single_changes(planner, config), now))
    return sorted(tried, key=lambda t: (t.plan.over(limits), t.plan.device_need))


def suggest(planner: Planner, config: DistConfig, limits: Limits, count: int = 3) -> list[Tried]:
    """The cheapest combinations that fit, cheapest first; only `config` itself if it already fits.

    Combinations that contain all changes of a cheaper one are omitted.
    """
    now = planner.plan(config)
    combined = sorted(_combinations(planner, config), key=lambda change: change.price)
    found: list[Tried] = []
    for tried in _planned(planner, config, combined, now):
        more = any(known.change.values.items() <= tried.change.values.items() for known in found)
        if not more and not tried.plan.over(limits):
            found.append(tried)
            if len(found) == count:
                break
    return found


def _planned(planner: Planner, config: DistConfig, changes: Iterable[Change], now: MemoryPlan) -> Iterator[Tried]:
    for change in changes:
        try:
            plan = planner.plan(change.of(config))
        except HfDistError:  # for example a model that cannot be split
            continue
        yield Tried(change, plan, now.device_need - plan.device_need)


def _stage(stage: int) -> Change:
    return Change(f"ZeRO stage {stage}", {f"{_ZERO}.stage": stage}, _STAGE_PRICES[stage])


_CHECKPOINTING = Change("gradient checkpointing", {"activation_checkpointing.every_n_layers": 1}, _AGAIN)
_KEPT_ON_HOST = Change("block inputs on the host", {"activation_checkpointing.cpu_checkpointing": True}, _ON_HOST)
_TILED = Change("tiled loss", {"hf_dist.tiled_loss": True}, _TILES)
_OFFLOADS = {
    "none": Change(""),
    "optimizer": Change("offload optimizer", {f"{_ZERO}.offload_optimizer.device": "cpu"}, _OPTIMIZER),
    "both": Change(
        "offload optimizer and weights",
        {f"{_ZERO}.offload_optimizer.device": "cpu", f"{_ZERO}.offload_param.device": "cpu"},
        _WEIGHTS,
    ),
}


def _shared(planner: Planner, config: DistConfig) -> list[Change]:
    """Share long rows over as many ranks as now, and over 2, 4, ... times as many. Samples per step stay the same."""
    found, now = [Change("")], config.sequence_parallel_size
    readers, steps = axes_of(config, planner.world_size).size("data"), settled(config.gradient_accumulation_steps) or 1
    for doublings in range(1, MAX_HALVINGS + 1):
        ranks = now << doublings
        if planner.workload.seq < _LONG or readers % 2**doublings:
            break
        values = {"sequence_parallel_size": ranks, "gradient_accumulation_steps": steps << doublings}
        found.append(Change(f"rows over {ranks} ranks", values, _SHARED * doublings))
    return found


def _smaller(planner: Planner, config: DistConfig) -> list[Change]:
    """The microbatch as it is, and repeatedly halved. Samples per step stay the same."""
    micro = settled(config.train_micro_batch_size_per_gpu) or planner.workload.micro
    steps = settled(config.gradient_accumulation_steps) or 1
    found = [Change("")]
    for halvings in range(1, MAX_HALVINGS + 1):
        if micro % 2**halvings:
            break
        size, count = micro >> halvings, steps << halvings
        values = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": count}
        found.append(Change(f"microbatches of {size}, {count} per step", values, _HALVED * halvings))
    return found


def _combinations(planner: Planner, config: DistConfig) -> Iterator[Change]:
    zero = config.zero_optimization
    stages = [Change("")] + [_stage(s) for s in range(4) if s != zero.stage and planner.world_size > 1]
    checkpointed = planner.workload.checkpointing or asks_for_checkpointing(config)[0]
    again = [Change("")] if checkpointed else [Change(""), _CHECKPOINTING]
    shared = _shared(planner, config)
    if len(shared) > 1 or config.sequence_parallel_size > 1:
        again += [] if config.activation_checkpointing.cpu_checkpointing else [again[-1] + _KEPT_ON_HOST]
    tiled = [Change("")] if settled(config.hf_dist.tiled_loss) else [Change(""), _TILED]
    has = zero.offload_optimizer.device != "none"
    for stage in stages:
        number = stage.values.get(f"{_ZERO}.stage", zero.stage)
        if number < (3 if zero.offload_param.device != "none" else 1 if has else 0):
            continue
        price = Change("", {}, _STAGE_PRICES[number] - stage.price)
        for name, needed in (("none", 0), ("optimizer", 1), ("both", 3)):
            if number < needed or (has and name != "none"):
                continue
            for rest in itertools.product(again, tiled, _batches(planner, config, shared)):
                yield functools.reduce(Change.__add__, rest, stage + _OFFLOADS[name] + price)


def _batches(planner: Planner, config: DistConfig, shared: list[Change]) -> list[Change]:
    """Combine smaller microbatches with shared rows; the numbers of microbatches multiply."""
    found, steps = [], "gradient_accumulation_steps"
    for row in shared:
        for smaller in _smaller(planner, config):
            both = row + smaller
            counts = [change.values[steps] for change in (row, smaller) if steps in change.values]
            if len(counts) == 2:
                own = settled(config.gradient_accumulation_steps) or 1
                both = Change(both.text, {**both.values, steps: counts[0] * counts[1] // own}, both.price)
            found.append(both)
    return found
