"""Which axis of a layout is likely to be wrong, from runs of the layout with fewer axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.tools.check.parts import ALONE, ONE_RANK, WITHOUT

__all__ = ["Blamed", "to_blame"]


@dataclass(frozen=True)
class Blamed:
    """A part of the layout, run like the whole layout."""

    axis: str
    named: str
    """The axis with its size, such as `tp 2`."""
    tried: str
    """`ALONE`, `WITHOUT` or `ONE_RANK`."""
    equal: bool
    first: str = ""
    """The first tensor that differs."""
    error: str = ""
    """The error of a failed run."""
    on: tuple[str, ...] = ()
    """Other axes whose faults it has as well."""

    @property
    def what(self) -> str:
        """For a person, such as `tp 2 alone`."""
        return {ALONE: f"{self.named} alone", WITHOUT: f"without {self.named}"}.get(self.tried, self.tried)


def to_blame(parts: Sequence[Blamed]) -> str:
    """The axes that differ alone, or without which the others are equal; empty if nothing was tried.

    Spread experts and split sequences run on ranks that average gradients as any others: where those differ as well, they are
    the ones to mend first.
    """
    if not parts:
        return ""
    if any(part.tried == ONE_RANK and not part.equal for part in parts):
        return "no axis: one rank of hf_dist differs as well"
    alone = {part.axis: part for part in parts if part.tried == ALONE and not part.equal}
    found = [part.named for part in alone.values() if not any(axis in alone for axis in part.on)]
    found = found or [part.named for part in parts if part.tried == WITHOUT and part.equal]
    return ", ".join(found) or "no axis by itself: only all of them together differ"
