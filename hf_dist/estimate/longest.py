"""The longest rows that fit, from plans at two lengths and the line through them.

A rank's memory grows linearly with the tokens of a row, so two plans are enough. The result is planned once more, because
rounding and the moment of the peak may differ.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_dist.estimate.memory_plan import Limits, MemoryPlan

__all__ = ["longest_rows"]

_PROBES = (4096, 16384)
"""Tokens of a row on one rank."""


def longest_rows(plan_at: Callable[[int], MemoryPlan], limits: Limits, ranks: int) -> int | None:
    """Tokens of the longest row that fits `limits`, a multiple of `ranks`; None if memory sets no limit, 0 if none fits.

    `plan_at(tokens)`: the plan for rows of that length, shared over `ranks`.
    """
    if limits.device is None and limits.host is None:
        return None
    short, long = (tokens * ranks for tokens in _PROBES)
    first, second = plan_at(short), plan_at(long)
    if first.problem:
        return None
    bounds = []
    for limit, small, large in (
        (limits.device, first.device_peak, second.device_peak),
        (limits.host, first.host * limits.ranks_per_machine, second.host * limits.ranks_per_machine),
    ):
        if limit is not None:
            each = max(large - small, 1) / (long - short)
            bounds.append(short + (limit - small) / each)
    found = max(0, int(min(bounds)) // ranks * ranks)
    step = max(ranks, found // 64 // ranks * ranks)
    while found > 0 and plan_at(found).over(limits):
        found = max(0, found - step)
    return found
