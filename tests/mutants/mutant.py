"""One planted fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """`before`, which a file has once, becomes `after`."""

    name: str
    """What is wrong then, in a few words."""
    file: str
    """Below `hf_dist/`."""
    before: str
    after: str
    tests: tuple[str, ...]
    """Files or cases below `tests/` of which one fails, likely ones first."""

    def plant(self, package: Path) -> None:
        """Change the copy of the package. Raises ValueError if `before` is not there exactly once."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.name}: hf_dist/{self.file} has {self.before!r} {text.count(self.before)} times, not once"
            )
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")
