"""Combines the reduced gradients of a window over the other axes: copies, stages that share a weight, slices of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dist.dist import collectives
from hf_dist.memory.offload.host import sent
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.group_axes import Combination
from hf_dist.sharding.messages import mean

__all__ = ["combine", "combine_together"]


def combine(group: FlatGroup, row: Combination) -> collectives.Handle:
    """Start to combine the window's gradient as one row of `axes.then` says. Collective over its axis, once per window.

    Between pipeline stages, the ranks also exchange which parameters had a gradient.
    """
    wire, link = group.messages.get("copies") if row.between_copies else None, group.rest.storage.link
    if row.operation == "scatter":
        assert group.awaiting is not None, "masters are cut among the copies"
        return group.awaiting.scatter(row.axis, group.gradient, row.axis is group.axes.outer[-1], wire, link)
    values = group.gradient.on_device()
    if wire is not None:
        return collectives.Handle([mean(row.axis, values, wire, link)], lambda: group.gradient.replace(values))
    handles = [collectives.all_reduce(row.axis, values, row.operation)]
    if not row.between_stages:
        return collectives.Handle(handles, lambda: group.gradient.replace(values))
    used = sent(torch.tensor(group.window.used, dtype=torch.float32), values.device)
    handles.append(collectives.all_reduce(row.axis, used, "sum"))

    def finish() -> None:
        group.gradient.replace(values)
        if not all(group.window.used):  # else the answer is known, and the host need not wait for it
            group.window.used = (used > 0).tolist()

    return collectives.Handle(handles, finish)


def combine_together(groups: Sequence[FlatGroup], row: Combination) -> collectives.Handle:
    """`combine` several groups with one collective; their gradients must share a dtype. Collective over `row.axis`."""
    if len(groups) == 1 or row.between_stages:
        return collectives.Handle([combine(group, row) for group in groups])
    values = [group.gradient.on_device() for group in groups]
    joined = torch.cat(values)

    def finish() -> None:
        for group, part in zip(groups, joined.split([v.numel() for v in values]), strict=True):
            group.gradient.replace(part)

    return collectives.Handle([collectives.all_reduce(row.axis, joined, row.operation)], finish)
