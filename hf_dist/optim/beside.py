"""What is trained elsewhere by the backwards of an engine's window, and steps when the window ends."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

__all__ = ["Beside"]


class Beside(Protocol):
    """Weights on other ranks whose gradients came from this engine's backwards. Every rank of the engine makes each call."""

    def norm_squared(self) -> float:
        """Of their gradient, without loss scale; 0 if they are clipped by their own norm. May be inf or nan."""

    def refuse(self, what: str) -> None:
        """Raise `ModelError`: `what` is not done to gradients elsewhere."""

    def step(self, factor: float, rate: float, *, skipped: bool) -> None:
        """Step with `factor` times their gradient and `rate` times their learning rate; drop the gradient if `skipped`."""

    def drop(self) -> None:
        """Drop their gradient, if there is one."""

    def save(self, folder: Path) -> None:
        """Write their weights and training state below a checkpoint's working folder."""

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Restore what `save` has written. Raises `CheckpointError`."""
