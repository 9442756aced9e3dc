"""A layout with fewer axes, on the same batches and reference, to find a difference axis by axis."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_dist.config import axes_of, load_config
from hf_dist.tools.check.job import Job

__all__ = ["ALONE", "ONE_RANK", "WITHOUT", "Part", "alone_parts", "one_rank", "parts_without_one"]

ALONE, WITHOUT, ONE_RANK = "alone", "without", "one rank"
"""What is tried: one axis by itself, all others, none."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "pp": ("pipeline",),
    "cp": ("sequence_parallel_size",),
    "tp": ("tensor_parallel",),
    "ep": ("expert_parallel",),
}
"""Axis -> its top-level keys in a config. `dp_replicate` and ZeRO, which stands for `dp_shard`, share `zero_optimization`."""
_SHARDS, _SECOND_COPY = "mics_shard_size", "zero_hpz_partition_size"
"""Keys of `zero_optimization` that count ranks, of which a part may have fewer."""
_OVER_COPIES = "optimizer_over"
"""The key of `hf_dist` that means something with `dp_replicate` only."""


@dataclass(frozen=True)
class Part:
    """A layout to try."""

    axis: str
    """The axis that is tried: a key of `_KEYS`, `dp_replicate` or ZeRO; for one rank none."""
    named: str
    """With its size, such as `tp 2`."""
    tried: str
    """`ALONE`, `WITHOUT` or `ONE_RANK`."""
    job: Job
    world: int
    on: tuple[str, ...] = ()
    """Other axes whose ranks it runs on, or whose gradients are averaged as its own: what is wrong there shows here."""


def alone_parts(job: Job) -> list[Part]:
    """Each axis of the layout by itself; empty if the layout has only one."""
    used = _used(job)
    return [_part(job, used, (name,), name, ALONE) for name in used] if len(used) > 1 else []


def parts_without_one(job: Job) -> list[Part]:
    """The layout without each of its axes, but for those without which the others cannot be."""
    used = _used(job)
    parts = [_part(job, used, tuple(n for n in used if n != name), name, WITHOUT) for name in used]
    return [part for part in parts if part.job != job]


def one_rank(job: Job) -> Part:
    """The engine without any axis."""
    return _part(job, _used(job), (), "", ONE_RANK)


def _used(job: Job) -> dict[str, int]:
    """Axes with more than one rank, and their sizes."""
    config = load_config(job.layout)
    world = config.pipeline.stages * config.sequence_parallel_size * config.tensor_parallel.autotp_size * job.data_ranks
    axes = axes_of(config, world)
    sizes = {name: axes.size(name) for name in (*_KEYS, "dp_replicate")} | {"ZeRO": axes.size("dp_shard")}
    return {name: size for name, size in sizes.items() if size > 1}


def _named(name: str, used: Mapping[str, int]) -> str:
    return f"{name} on {used[name]} data ranks" if name == "ZeRO" else f"{name} {used[name]}"


def _part(job: Job, used: Mapping[str, int], names: Sequence[str], axis: str, tried: str) -> Part:
    """The job with only the axes `names`. A step has as many microbatches as before, so fewer data ranks get more each."""
    kept = {name: used[name] for name in names}
    shards = _shards(job, used, kept)
    if shards is None:  # experts that only the ranks of a sequence hold: there are too few rows for ranks of their own
        kept["cp"], shards = used["cp"], used.get("ZeRO", 1)
    layout = copy.deepcopy(job.layout)
    for name in used:
        if name not in kept:
            for key in _KEYS.get(name, ()):
                layout.pop(key, None)
    data = shards * kept.get("dp_replicate", 1)
    is_less = data != job.data_ranks or ("cp" in used and "cp" not in kept)
    zero = layout.get("zero_optimization", {})
    if ("ZeRO" in used or "dp_replicate" in used) and not {"ZeRO", "dp_replicate"} & kept.keys():
        layout.pop("zero_optimization", None)
    elif is_less:
        zero.pop(_SECOND_COPY, None)
        size = zero.pop(_SHARDS, 0)
        if "dp_replicate" in kept:
            zero[_SHARDS] = shards * min(kept.get("cp", 1), size)
    if "dp_replicate" not in kept:
        layout.get("hf_dist", {}).pop(_OVER_COPIES, None)
    steps = job.window // data
    layout["gradient_accumulation_steps"] = steps
    world = data * math.prod(kept.get(name, 1) for name in ("pp", "cp", "tp"))
    part = replace(job, layout=layout, data_ranks=data, accumulation=steps)
    on = {"ep": ("ZeRO", "cp") if "cp" in kept else ("ZeRO",), "cp": ("ZeRO",)}.get(axis, ())
    return Part(
        axis, _named(axis, used) if axis else "", tried, part, world, tuple(name for name in on if name in used)
    )


def _shards(job: Job, used: Mapping[str, int], kept: Mapping[str, int]) -> int | None:
    """Ranks of `dp_shard` of a part; None if it cannot have as many as it needs.

    Experts are spread over them, or over the ranks of a sequence. They get all that the layout has, even where ZeRO is left
    out, because ranks that share an expert belong to `ep` as well.
    """
    own = used.get("ZeRO", 1) if {"ZeRO", "ep"} & kept.keys() else 1
    needed = used["ep"] // math.gcd(used["ep"], kept.get("cp", 1)) if "ep" in kept else 1
    if own % needed == 0:
        return own
    return needed if job.window % (needed * kept.get("dp_replicate", 1)) == 0 else None
