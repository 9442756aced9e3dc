"""Lets a fused step itself multiply gradients or skip, so that neither needs a separate pass or a wait of the host.

torch's fused Adam reads `grad_scale` (divisor of gradients) and `found_inf` (1: change nothing) from attributes of the
optimizer, as set by torch's gradient scaler. A separate pass over fp32 gradients would move 8 bytes per element, mostly to
multiply by 1; a host that reads whether a norm is finite would wait for the whole backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hf_dist.optim.raw_calls import watched

__all__ = ["StepScaling", "takes_scaling"]

_GIVEN = ("grad_scale", "found_inf")


@dataclass(frozen=True)
class StepScaling:
    """Operations that are left to a step."""

    factor: torch.Tensor | None = None
    """0D factor of the gradients; None for 1."""
    skip: torch.Tensor | None = None
    """0D fp32: if 1, the step changes nothing; None for 0."""

    @contextmanager
    def given_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Make `optimizer.step()` inside the block scale or skip; requires `takes_scaling(optimizer)`. Local."""
        values = (None if self.factor is None else self.factor.float().reciprocal(), self.skip)
        for name, value in zip(_GIVEN, values, strict=True):
            if value is not None:
                setattr(optimizer, name, value)
        try:
            yield
        finally:
            for name in _GIVEN:
                vars(optimizer).pop(name, None)


def takes_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is a torch class that reads both attributes, and no hook reads its gradients before the step.

    Not SGD: if its kernel skips, a new momentum buffer stays uninitialised.
    """
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not watched(optimizer)
    return plain and all(group.get("fused") for group in optimizer.param_groups)
