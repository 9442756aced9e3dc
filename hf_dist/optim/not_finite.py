"""The first step that was made with a gradient that is not finite; on a GPU the host does not wait to know."""

from __future__ import annotations

import torch

__all__ = ["NotFinite"]


class NotFinite:
    """Of one engine. A step that was skipped because of its gradient is not noted: it left the weights as they were."""

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None

    def note(self, norm: torch.Tensor, step: int) -> None:
        """Optimizer step `step` is made with a gradient of that norm (0D)."""
        known = torch.zeros((), dtype=torch.int64, device=norm.device) if self._step is None else self._step
        self._step = torch.where((known == 0) & ~torch.isfinite(norm), step, known)

    @property
    def step(self) -> int:
        """Its number, 0 if there is none. On a GPU the host waits for the device."""
        return 0 if self._step is None else int(self._step)

    def forget(self) -> None:
        """Begin anew, after a load or if the weights are finite all the same."""
        self._step = None
