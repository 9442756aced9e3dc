"""The errors a user can see. Every message says what was found, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class HfDistError(Exception):
    """Base of every error raised by hf_dist on purpose."""


class ConfigError(HfDistError, ValueError):
    """One or more settings are wrong; `problems` holds all of them, not only the first."""

    def __init__(self, problems: list[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem(path="", found="", expected=problems, fix="")
        self.problems: list[Problem] = [problems] if isinstance(problems, Problem) else list(problems)
        many = len(self.problems) > 1
        head = f"{len(self.problems)} problems in the configuration:\n" if many else ""
        super().__init__(head + "\n".join(("- " if many else "") + str(p) for p in self.problems))


class TopologyError(HfDistError, ValueError):
    """The processes, devices or axes of the mesh are inconsistent."""


class ModelError(HfDistError, ValueError):
    """The model, or a call on it, is one that hf_dist cannot handle."""


class FreedParameterError(HfDistError, RuntimeError):
    """A parameter was read while only its shard is in memory."""


class CheckpointError(HfDistError, ValueError):
    """A checkpoint is missing, incomplete, or has a layout that cannot be read."""


class OneRankError(HfDistError, RuntimeError):
    """Only one rank made a call that all ranks must make."""


class RemoteError(HfDistError, RuntimeError):
    """Another role has raised, has ended, or does not answer."""

    def __init__(self, message: str, ended: str = "") -> None:
        """`ended`: the process that has ended, where that is all that is known."""
        super().__init__(message)
        self.ended = ended


class OverflowAtMinimumScaleError(HfDistError, RuntimeError):
    """fp16 gradients overflowed although the loss scale is already at its minimum."""


@dataclass(frozen=True)
class Problem:
    """One wrong setting: its location, what was found, what was expected, and the fix."""

    path: str
    """JSON path (`zero_optimization.stage`) or the name of the argument."""
    found: str
    """The value as the user wrote it (its repr), empty when there is none."""
    expected: str
    """What was expected, as a clause that follows `found`."""
    fix: str
    """What to do, as a sentence; empty when `expected` already says it."""
    file: str = ""
    """File (and line, as `path:line`) that the value came from; empty for a dict."""

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        subject = f"{self.path}: " if self.path else ""
        value = f"{self.found} " if self.found else ""
        return f"{where}{subject}{value}{self.expected}" + (f". {self.fix}" if self.fix else "")


def first_of(names: Sequence[str], number: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join([*names[:number], *([f"and {len(names) - number} more"] if len(names) > number else [])])
