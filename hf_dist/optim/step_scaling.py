"""What a fused step does on its way through the gradients: multiply them, or leave everything as it is. Nothing is read first.

torch's fused Adam takes `grad_scale` (what gradients are divided by) and `found_inf` (1: change nothing) from attributes of the
optimizer; that is how torch's gradient scaler talks to it. A pass of its own over fp32 gradients moves 8 bytes per element,
mostly to multiply by 1, and a host that asks whether a norm is finite waits for the whole backward.
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
    """What is left to a step."""

    factor: torch.Tensor | None = None
    """0D: the gradients are multiplied by it; None for 1."""
    skip: torch.Tensor | None = None
    """0D fp32: where it is 1, the step changes nothing; None for 0."""

    @contextmanager
    def given_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, `optimizer.step()` does it; `takes_scaling(optimizer)` was true. Local."""
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
    """Whether `optimizer` is one of torch's that read both, and nobody looks at its gradients before it steps.

    Not SGD: its kernel leaves a momentum that is new without values when it skips.
    """
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not watched(optimizer)
    return plain and all(group.get("fused") for group in optimizer.param_groups)
