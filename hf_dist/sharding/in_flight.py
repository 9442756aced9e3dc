"""How many elements may be on their way at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InFlightLimits:
    """Elements on their way at once; at least one unit, where it is not 0."""

    prefetch: int = 50_000_000
    """Weights gathered ahead of their use, 0 for none."""
    gather: int = 500_000_000
    """Weights gathered after a step; of no account on a GPU."""
    reduce: int = 500_000_000
    """Gradients, 0 to wait for each unit at once."""
