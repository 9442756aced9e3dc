"""A rank's part of a parameter: the unit in which weights and optimizer state are written."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist.offload.store import Sliceable


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """Elements [start, stop) of a flattened parameter. Over all writing ranks every element is in exactly one part."""

    name: str
    """Full parameter name."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int
    values: Sliceable
    """1-D, `stop - start` elements; fp32 master weights, or the resting dtype of frozen ones; on any device, or on disk."""
