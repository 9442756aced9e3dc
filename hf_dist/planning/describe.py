"""A plan as text, for `hf-dist plan` and for out-of-memory errors."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dist.format_bytes import size_text
from hf_dist.memory.offload.resting import Tier
from hf_dist.planning.advice import Tried
from hf_dist.planning.memory_plan import Limits, MemoryPlan
from hf_dist.sharding.placement import Stay

_TIGHT = 0.9
"""Share of a memory above which a fit is called tight, because fragmentation takes some."""


def kept_units(plan: MemoryPlan) -> str:
    """How many units stay gathered, and how long."""
    to_backward, window = (len(plan.states.kept(stay)) for stay in (Stay.BACKWARD, Stay.WINDOW))
    return (
        f"{to_backward} of {len(plan.states.units)} units stay gathered from forward to backward, {window} over the window "
        f"({size_text(plan.states.kept_units_nbytes)})"
    )


def plan_table(plan: MemoryPlan) -> list[str]:
    """The rows of a plan and their sums, one line each."""
    rows = [(what, size_text(nbytes), kind) for what, nbytes, kind in plan.rows()]
    rows.append(("device, at rest", size_text(plan.states.nbytes.resident(Tier.DEVICE)), "exact"))
    rows.append(("device, peak", size_text(plan.device_peak), "estimate"))
    if plan.beside:
        rows.append(("CUDA's context, cuBLAS, NCCL", size_text(plan.beside), "rough estimate"))
        rows.append(("device, needed", size_text(plan.device_need), "the two together"))
    rows += [(what, size_text(n), "") for what, n in (("host", plan.host), ("disk", plan.disk)) if n]
    rows.append(("one checkpoint", size_text(plan.checkpoint), "of the job"))
    width, numbers = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
    lines = [f"{what:<{width}}  {number:>{numbers}}  {kind}".rstrip() for what, number, kind in rows]
    if plan.states.stays:
        lines.append(kept_units(plan))
    if plan.problem:
        lines.append(f"activations and logits are not counted: the model does not run on meta ({plan.problem})")
    return lines


def verdict(plan: MemoryPlan, limits: Limits) -> list[str]:
    """One line for each memory of known size."""
    sums = [("device", plan.device_need, limits.device)]
    ranks = limits.ranks_per_machine
    sums.append((f"host ({ranks} rank{'s' if ranks > 1 else ''})", plan.host * ranks, limits.host))
    lines = []
    for what, needed, there in sums:
        if there is None:
            continue
        fits = f"fits, {size_text(there - needed)} to spare" if needed <= there else "does not fit"
        tight = ", which is tight" if _TIGHT * there < needed <= there else ""
        lines.append(f"{what}: {size_text(needed)} of {size_text(there)}: {fits}{tight}")
    return lines


def settings(tried: Sequence[Tried], limits: Limits) -> list[str]:
    """What each change saves of what the device needs, and whether it is enough."""
    known = limits.device is not None or limits.host is not None
    lines = []
    for each in tried:
        if each.saved <= 0:
            continue
        needed = size_text(each.saved + each.plan.device_need)
        line = f"{each.change.text}: saves {size_text(each.saved)} of {needed} on the device"
        more_host = each.plan.host
        line += f", {size_text(more_host)} on the host" if more_host else ""
        if known:
            line += "; fits" if not each.plan.over(limits) else "; not enough alone"
        lines.append(line + f" ({json_paths(each)})")
    return lines


def json_paths(tried: Tried) -> str:
    """The settings as written in a config."""
    return ", ".join(f"{path}: {str(value).lower()}" for path, value in tried.change.values.items())
