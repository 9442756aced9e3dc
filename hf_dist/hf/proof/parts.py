"""A layout with fewer axes, on the same batches and reference, to find a difference axis by axis."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_dist.config import axes_of, load_config
from hf_dist.hf.proof.job import Job

__all__ = ["ONE_RANK", "Part", "alone_parts", "one_rank", "parts_without_one"]

ONE_RANK = "one rank"

_KEYS: Mapping[str, tuple[str, ...]] = {
    "pp": ("pipeline",),
    "cp": ("sequence_parallel_size",),
    "tp": ("tensor_parallel",),
    "ep": ("expert_parallel",),
    "ZeRO": ("zero_optimization",),
}
"""Axis -> its top-level keys in a config. ZeRO stands for the ranks that it shards over, and for replicas of those."""
_OF_SHARDS = ("mics_shard_size", "zero_hpz_partition_size")
"""Group sizes that may exceed the ranks of a part."""


@dataclass(frozen=True)
class Part:
    """A layout to try."""

    axes: str
    job: Job
    world: int


def alone_parts(job: Job) -> list[Part]:
    """Each axis of the layout by itself; empty if the layout has only one."""
    used = _used(job)
    return [_part(job, used, (name,), f"{_named(name, used)} alone") for name in used] if len(used) > 1 else []


def parts_without_one(job: Job) -> list[Part]:
    """The layout without each of its axes."""
    used = _used(job)
    return [_part(job, used, tuple(n for n in used if n != name), f"without {_named(name, used)}") for name in used]


def one_rank(job: Job) -> Part:
    """The engine without any axis."""
    return _part(job, _used(job), (), ONE_RANK)


def _used(job: Job) -> dict[str, int]:
    """Axes with more than one rank, and their sizes."""
    config = load_config(job.layout)
    world = config.pipeline.stages * config.sequence_parallel_size * config.tensor_parallel.autotp_size * job.data_ranks
    axes = axes_of(config, world)
    found = {name: axes.size(name) for name in ("pp", "cp", "tp", "ep") if axes.size(name) > 1}
    return {**found, **({"ZeRO": axes.size("data")} if axes.size("data") > 1 else {})}


def _named(name: str, used: Mapping[str, int]) -> str:
    return f"{name} on {used[name]} data ranks" if name == "ZeRO" else f"{name} {used[name]}"


def _part(job: Job, used: Mapping[str, int], kept: tuple[str, ...], named: str) -> Part:
    """The job with only these axes. A step has as many microbatches as before, so fewer data ranks get more each."""
    layout = copy.deepcopy(job.layout)
    for name in used:
        if name not in kept:
            for key in _KEYS[name]:
                layout.pop(key, None)
    data = 1
    if "ZeRO" in kept:
        data = job.data_ranks
    elif "ep" in kept:  # experts are spread over data ranks, or over the ranks of a sequence
        spread = used["ep"] // math.gcd(used["ep"], used.get("cp", 1) if "cp" in kept else 1)
        data = spread if job.window % spread == 0 else job.data_ranks
    has_fewer = data != job.data_ranks or ("cp" in used and "cp" not in kept)
    if has_fewer and "zero_optimization" in layout:
        for key in _OF_SHARDS:
            layout["zero_optimization"].pop(key, None)
    steps = job.window // data
    layout["gradient_accumulation_steps"] = steps
    world = data * math.prod(used[name] for name in kept if name in ("pp", "cp", "tp"))
    return Part(named, replace(job, layout=layout, data_ranks=data, accumulation=steps), world)
