"""Base of the optimizers in this package: torch's `step`, applied tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PerTensor"]


class PerTensor(torch.optim.Optimizer):
    """Subclasses override `_step_tensor`, or `_step_group` to step many tensors in one call."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                self._step_tensor(p, p.grad, group)

    def _step_tensor(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, object]) -> None:
        raise NotImplementedError
