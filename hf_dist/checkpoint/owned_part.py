"""A rank's part of a parameter: the unit in which weights and optimizer state are written."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist.memory.offload.resting import Sliceable
from hf_dist.tensors.tensor_slice import TensorSlice


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """Elements [start, stop) of the flattened slice that a rank holds of a parameter. Over all writing ranks, each element of
    the whole parameter is in exactly one part."""

    name: str
    """Full parameter name."""
    held: TensorSlice
    """The rank's slice of the parameter; files hold the whole parameter."""
    start: int
    stop: int
    values: Sliceable
    """1-D, `stop - start` elements: fp32 master weights, or frozen weights in their resting dtype. On any device or on disk."""
