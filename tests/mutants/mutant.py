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

    def planted(self, text: str) -> str:
        """The text of the file with the fault. Raises ValueError if `before` is not there exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.name}: hf_dist/{self.file} has {self.before!r} {text.count(self.before)} times, not once"
            )
        return text.replace(self.before, self.after)

    def plant(self, package: Path) -> None:
        """Change the copy of the package."""
        path = package / self.file
        path.write_text(self.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
