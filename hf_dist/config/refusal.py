"""A row of the lists in `refusals.py`: two settings that cannot be combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_dist.config.schema import DistConfig

__all__ = ["Elsewhere", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """Two settings that cannot be combined, although each alone is fine."""

    path: str
    """The key that is refused."""
    beside: str
    """The other setting, as shown in the table."""
    both: Callable[[DistConfig], bool]
    why: str
    """The reason in the table."""
    expected: str
    """A clause of the message; `{other}` stands for the value at `other`."""
    fix: str
    one: Mapping[str, Any]
    """The refused setting alone, as in a file; for tests."""
    two: Mapping[str, Any]
    """The other setting alone; for tests."""
    other: str = ""
    """Path of the other key, if the message names its value or that value may itself be wrong."""
    further: Callable[[DistConfig], str] = lambda config: ""
    """A second sentence of the fix, which depends on the file; empty where there is none."""

    def remedy(self, config: DistConfig) -> str:
        """The fix in full, for this file."""
        return f"{self.fix} {self.further(config)}".strip()


@dataclass(frozen=True)
class Elsewhere:
    """A conflict that depends on the model or the script."""

    setting: str
    beside: str
    file: str
    """File in `hf_dist/` that raises the error."""
    words: str
    """Words of its message."""
