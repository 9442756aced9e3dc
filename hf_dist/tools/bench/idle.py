"""How long a GPU only communicated, from a trace of its kernels."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gpu_idle_seconds"]

Spans = list[tuple[float, float]]


def gpu_idle_seconds(profile: Any) -> float:
    """Seconds in which only kernels of collectives ran."""
    wire: Spans = []
    others: Spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            spans = wire if "nccl" in event.name.lower() else others
            spans.append((event.time_range.start, event.time_range.end))
    return (_length([*wire, *others]) - _length(others)) / 1e6


def _length(spans: Spans) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
