"""A rank's part of a parameter: the unit in which weights and optimizer state are written."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist.boxes import TensorSlice
from hf_dist.offload.resting import Sliceable


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """Elements [start, stop) of what a rank keeps of a parameter, flattened. Over all writing ranks every element of the
    whole parameter is in exactly one part."""

    name: str
    """Full parameter name."""
    held: TensorSlice
    """What the rank keeps of the parameter; files have all of it."""
    start: int
    stop: int
    values: Sliceable
    """1-D, `stop - start` elements; fp32 master weights, or the resting dtype of frozen ones; on any device, or on disk."""
