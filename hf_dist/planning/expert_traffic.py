"""Bytes that experts send, if their weights are gathered or if tokens are sent to them, and at how many tokens both are equal.

One rank, one microbatch of T tokens, a layer of experts with P elements of which k are chosen, among N ranks; ep of these
hold different experts (edp = N / ep):

    weights   P / ep x (edp - 1) / edp x (gathers x bytes of a weight + reductions x bytes of a gradient)
    tokens    4 x T x r x H x bytes of an activation x (ep - 1) / ep      r = ep (1 - (1 - 1/ep)^k): ranks a token is sent to

Forward and backward send tokens to the experts and back; recomputed blocks do so once more. Routing is assumed to be even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_dist.config import DistConfig, settled
from hf_dist.format_bytes import scaled, size_text
from hf_dist.model_config import field, text_config
from hf_dist.parallel.experts.spread import expert_counts, find_experts
from hf_dist.sharding.placement import Placement, placements_for
from hf_dist.sharding.precision import precision_for

__all__ = ["ExpertTraffic", "advice", "choices", "crossover"]

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "top_k")


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that one rank sends for all expert layers in a microbatch."""

    ep: int
    weights: int
    """Bytes of gathered and reduced expert weights."""
    tokens: int

    @property
    def nbytes(self) -> int:
        """Both together."""
        return self.weights + self.tokens


def choices(
    model: nn.Module, config: DistConfig, *, shard: int, here: int, tokens: int, recomputed: bool = False, tp: int = 1
) -> list[ExpertTraffic]:
    """One entry per `ep` that divides the experts, the `shard` ranks and a machine's ranks (`here`); empty without experts.

    `tokens`: of a rank's microbatch; `recomputed`: backward recomputes blocks; `tp`: ranks that split matrices, including
    experts that are not spread; if experts are spread, each rank sends part of the tokens. `model` may be on meta.
    """
    found = find_experts(model)
    chosen = _chosen(model)
    if not found or chosen is None:
        return []
    most = math.gcd(shard, here, *expert_counts(model))
    sizes = [ep for ep in range(1, most + 1) if most % ep == 0]
    rows = [_traffic(model, found.values(), config, shard, ep, chosen, -(-tokens // tp), recomputed) for ep in sizes]
    return [replace(row, weights=row.weights // tp) if row.ep == 1 else row for row in rows]


def _traffic(
    model: nn.Module, found: Any, config: DistConfig, shard: int, ep: int, chosen: int, tokens: int, recomputed: bool
) -> ExpertTraffic:
    placements, precision = placements_for(config), precision_for(config, model)
    steps = settled(config.gradient_accumulation_steps) or 1
    gathers = 2.0 if placements.params is Placement.SHARD else (1 / steps if placements.optim is Placement.SHARD else 0)
    reductions = 1.0 if placements.grads is Placement.SHARD else 1 / steps
    reductions *= 1 if placements.optim is Placement.SHARD else 2
    edp = shard // ep
    weights = visits = 0.0
    for module in found:
        params = [p for p in module._parameters.values() if p is not None]
        numel, learning = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        width = min(max(params[0].shape[1:]), _width(model))
        moved = numel * gathers * precision.compute.itemsize + learning * reductions * precision.wire(edp).itemsize
        weights += moved / ep * (edp - 1) / edp
        ranks = ep * (1 - (1 - 1 / ep) ** chosen)
        visits += (6 if recomputed else 4) * tokens * ranks * width * precision.compute.itemsize * (ep - 1) / ep
    return ExpertTraffic(ep, round(weights), round(visits))


def crossover(gathered: ExpertTraffic, spread: ExpertTraffic, tokens: int) -> float:
    """Number of tokens per rank and microbatch below which `spread` sends fewer bytes than `gathered` (ep 1)."""
    saved = gathered.weights - spread.weights
    return saved / (spread.tokens / tokens) if spread.tokens else math.inf


def advice(rows: Sequence[ExpertTraffic], ep: int, tokens: int) -> list[str]:
    """Lines for a plan: one row per `ep`, and which one to choose. `ep`: the current size."""
    if len(rows) < 2:
        return []
    best = min(rows, key=lambda row: (row.nbytes, -row.ep))
    lines = [f"bytes that a rank sends for experts in a microbatch of {scaled(tokens).strip()} tokens:"]
    for row in rows:
        below = (
            f", fewer than ep 1 below {scaled(crossover(rows[0], row, tokens)).strip()} tokens" if row.ep > 1 else ""
        )
        mark = " (in use)" if row.ep == ep else ""
        lines.append(f"ep {row.ep:<3} weights {size_text(row.weights)}, tokens {size_text(row.tokens)}{below}{mark}")
    if best.ep != ep:
        key = f'"expert_parallel": {{"enabled": true, "autoep_size": {best.ep}}}'
        lines.append(f"take {key}" if best.ep > 1 else "leave expert_parallel out: gathering sends less")
    return lines


def _chosen(model: nn.Module) -> int | None:
    """Experts per token, from the model's config."""
    config: object = getattr(model, "config", None)
    text = text_config(config)
    return next((int(n) for n in (field(text, name) for name in _CHOSEN) if isinstance(n, int)), None)


def _width(model: nn.Module) -> int:
    config: object = getattr(model, "config", None)
    return int(field(text_config(config), "hidden_size", 0) or 1 << 30)
