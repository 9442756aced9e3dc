"""The start-up report: what will run, where each number comes from, what is stored in which dtype, which units."""

from __future__ import annotations

from collections import Counter

from hf_dist.activation import describe_checkpointing
from hf_dist.config import BatchSizes, DistConfig, format_table
from hf_dist.offload.store import Tier
from hf_dist.pipelined import Pipeline
from hf_dist.sharding.placement import Placement
from hf_dist.sharding.runtime import ShardedModel

MAX_UNIT_KINDS = 6
"""Kinds of units that are listed, largest first; the rest is counted. The report is to fit a screen."""
_PLACES = {
    Tier.DEVICE: ("weights and master weights", "optimizer state"),
    Tier.HOST: ("offloaded weights, masters, gradients", "optimizer state on the host"),
    Tier.DISK: ("weights and master weights on disk", "optimizer state on disk"),
}
_RESTS = {
    Placement.SHARD: "sharded",
    Placement.REPLICATE: "replicated",
    Placement.PARTIAL: "replicated (reduced once per step)",
}


def start_up_report(
    sharded: ShardedModel, config: DistConfig, batch: BatchSizes, pipeline: Pipeline | None = None
) -> str:
    """Plain text, printed once by rank 0."""
    place = sharded.placements
    weights, grads, optim = (_RESTS[p] for p in (place.params, place.grads, place.optim))
    parts = {
        "layout": [sharded.mesh.describe(), f"weights {weights}, gradients {grads}, optimizer state {optim}"],
        **({"pipeline": pipeline.describe()} if pipeline else {}),
        "batch": [_batch(batch)],
        "precision": _aligned(sharded.precision.rows()),
        "units": _units(sharded),
        "memory": _memory(sharded),
        "recompute": describe_checkpointing(sharded.model),
        "config": format_table(config).splitlines(),
    }
    lines = ["hf_dist start-up report"]
    for name, rows in parts.items():
        lines += [f"  {name if i == 0 else '':<9}  {row}" for i, row in enumerate(rows)]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(what) for what, _ in rows)
    return [f"{what:<{width}}  {value}" for what, value in rows]


def _batch(batch: BatchSizes) -> str:
    ranks = f"{batch.data_ranks} data rank{'s' if batch.data_ranks > 1 else ''}"
    if batch.micro is None:
        return f"{batch.accumulation} microbatches per step on {ranks}, microbatch size of the loader"
    micro = f"{batch.micro} per rank and microbatch"
    return f"{batch.train} samples per step = {micro} x {batch.accumulation} microbatches x {ranks}"


def _units(sharded: ShardedModel) -> list[str]:
    """What is gathered together, kinds with most elements first."""
    kinds = Counter(
        (type(u.modules[0]).__name__ if u.name else "rest of the model", u.numel) for u in sharded.units if u.numel
    )
    order = sorted(kinds.items(), key=lambda item: -item[0][1] * item[1])
    rows = [
        (f"{count} x {kind}" if count > 1 else kind, f"{_scaled(numel)} elements{' each' if count > 1 else ''}")
        for (kind, numel), count in order
    ]
    more = [f"and {len(rows) - MAX_UNIT_KINDS} more kinds"] if len(rows) > MAX_UNIT_KINDS else []
    return (_aligned(rows[:MAX_UNIT_KINDS]) if rows else ["none"]) + more


def _memory(sharded: ShardedModel) -> list[str]:
    """Bytes of model states per rank and kind of memory, by the formula (Adam-like optimizer: two fp32 states)."""
    total = sum(g.layout.num_params for g in sharded.groups)
    learning = sum(g.layout.num_params for g in sharded.trainable_groups)
    held = sharded.resident_nbytes()
    rows: list[tuple[str, str]] = []
    for tier, (weights, states) in _PLACES.items():
        groups = [g for g in sharded.trainable_groups if g.master.tier is tier]
        trained = sum(g.source.numel() for g in groups)
        if held[tier]:
            rows.append((weights, f"{_scaled(held[tier])}B"))
        if trained:
            rows.append((states, f"{_scaled(trained * 8)}B if it is two numbers per element (Adam)"))
    on_device = sum(g.source.numel() for g in sharded.trainable_groups if g.master.tier is Tier.DEVICE)
    if on_device:
        rows.append(("gradients", f"up to {_scaled(on_device * sharded.precision.grads.itemsize)}B"))
    if sharded.placements.params is Placement.SHARD:
        root, *others = (sum(g.layout.numel * g.dtype.itemsize for g in u.groups) for u in sharded.units)
        needed = root + max(others, default=0)
        rows.append(
            ("weights gathered for use", f"{_scaled(needed)}B or more (rest of the model, largest unit, prefetch)")
        )
    return [f"{_scaled(total)} parameters, {_scaled(learning)} of them trained; per rank:", *_aligned(rows)]


def _scaled(number: float) -> str:
    """Three digits and the SI prefix, such as `37 k` or `1.24 G`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
