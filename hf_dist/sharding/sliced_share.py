"""What all groups share of a model whose matrices are cut along `tp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_dist.sharding.group_axes import Combination

__all__ = ["SlicedShare"]


@dataclass
class SlicedShare:
    """One rank's share of a model whose matrices are cut along `tp`; `gathered` uses it to join the slices."""

    copies: Mapping[str, Sequence[Combination]]
    """Parameters that other ranks along the axis also hold, and how their gradients are combined."""
    use_whole: Callable[[bool], None]
    """Called with True when the model starts to compute with whole parameters, with False when it stops."""
    groups: set[int] = field(default_factory=set)
    """Ids of the groups with slices."""
    whole: set[int] = field(default_factory=set)
    """Ids of those groups whose parameters are whole now."""
