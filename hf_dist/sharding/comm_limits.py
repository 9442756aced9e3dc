"""Limits on the elements in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InFlightLimits:
    """How many elements may be in flight at once. A limit above 0 always admits at least one unit."""

    prefetch: int = 50_000_000
    """Weights prefetched ahead of their use; 0 disables prefetch."""
    gather: int = 500_000_000
    """Weights gathered after a step; ignored on a GPU."""
    reduce: int = 500_000_000
    """Gradients in reduction; 0 waits for each unit at once."""
