"""The longest rows that fit, from plans at two lengths and the line through them.

A rank's memory grows linearly with the tokens of a row, except where the moment of its peak changes. So the line through two
plans says where to look, and plans around that place bracket the answer: few of them, as each runs a forward.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_dist.planning.memory_plan import Limits, MemoryPlan

__all__ = ["longest_rows"]

_PROBES = (4096, 16384)
"""Tokens of a row on one rank."""
_MOST = 2**28
"""No row is longer: memory that has not grown by then sets no limit."""
_PART = 64
"""The answer is short by at most this part of it."""


def longest_rows(
    plan_at: Callable[[int], MemoryPlan], limits: Limits, ranks: int, positions: int | None = None
) -> int | None:
    """Tokens of the longest row that fits `limits`, a multiple of `ranks`; None if memory sets no limit, 0 if none fits.

    `plan_at(tokens)`: the plan for rows of that length, shared over `ranks`. `positions`: the model runs on no longer rows.
    """
    if limits.device is None and limits.host is None:
        return None
    short, long = (tokens * ranks for tokens in _PROBES)
    most = _MOST if positions is None else positions // ranks * ranks
    if most < long:
        if most == 0 or not plan_at(most).over(limits):
            return most
        short, long = max(ranks, most // 4 // ranks * ranks), most
    first, second = plan_at(short), plan_at(long)
    if first.problem:
        return None
    while (
        (second.device_peak, second.host) == (first.device_peak, first.host) and long < most and not second.over(limits)
    ):
        long = min(4 * long, most)
        second = plan_at(long)
    bounds = []
    for limit, small, large in (
        (limits.device, first.device_peak, second.device_peak),
        (limits.host, first.host * limits.ranks_per_machine, second.host * limits.ranks_per_machine),
    ):
        if limit is not None and large > small:
            bounds.append(short + (limit - small) * (long - short) / (large - small))
    if not bounds:
        return 0 if first.over(limits) else None
    fits, over, more = 0, min(most, max(ranks, int(min(bounds)) // ranks * ranks)), 0
    while not plan_at(over).over(limits):
        if over == most:
            return most
        more = 2 * more or _step(over, ranks)
        fits, over = over, min(most, over + more)
    while over - fits > _step(fits, ranks):
        middle = (fits + over) // 2 // ranks * ranks
        fits, over = (fits, middle) if plan_at(middle).over(limits) else (middle, over)
    return fits


def _step(tokens: int, ranks: int) -> int:
    return max(ranks, tokens // _PART // ranks * ranks)
