"""Optimizers that send their momentum, a bit an element, once the variance is settled: what the engine asks of their classes.

    message of a step    what ranks average                        what the variance does
    none                 gradients, as with any optimizer          is updated
    gradient             gradients in the codec `signs`            stays
    momentum             b1 m + (1 - b1) g of each rank in `signs` stays

A class is a torch optimizer of its own: in one process each step reads gradients, and nothing is rounded. In an engine of
several ranks `sent_momentum.py` lends it the momentum that has arrived in place of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import torch

__all__ = ["Compressed", "Message", "settled"]

STEPS = "steps"
"""Option of each param group: steps so far. Not a state of parameters: a rank may hold no element of any."""


class Message(Enum):
    """What ranks send each other of a step."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"


class Compressed(torch.optim.Optimizer):
    """Base of the optimizers whose messages have signs alone."""

    arrived = False
    """Whether `.grad` of the step that runs is momentum that has arrived. Set by the engine."""
    joined: Callable[[torch.Tensor, Literal["sum", "max"]], None] | None = None
    """Adds up a tensor in place over the ranks that hold the other parts of each parameter; None: this rank has all."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, STEPS: 0})

    @property
    def steps(self) -> int:
        """Steps so far, equal on all ranks."""
        return int(self.param_groups[0][STEPS])

    def message(self) -> Message | None:
        """What the next step sends; None for the ordinary mean of gradients. Equal on all ranks."""
        raise NotImplementedError

    def begins(self) -> bool:
        """Whether the next step is the first one whose message is of its kind, so that no earlier rest belongs to it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        message = self.message()
        self._step_groups(message)
        self._stepped(message)
        for group in self.param_groups:
            group[STEPS] = group[STEPS] + 1
        return loss

    def _step_groups(self, message: Message | None) -> None:
        raise NotImplementedError

    def _stepped(self, message: Message | None) -> None:
        """Called after a step; may change options of param groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's; parameters that come later are as far as the others."""
        super().add_param_group(param_group)
        self.param_groups[-1][STEPS] = self.param_groups[0][STEPS]

    def _momentum(
        self, state: dict[str, Any], grad: torch.Tensor, beta: float, message: Message | None
    ) -> torch.Tensor:
        """`exp_avg` of one parameter after this step."""
        momentum: torch.Tensor = state["exp_avg"]
        if message is Message.MOMENTUM and self.arrived:
            return momentum.copy_(grad)
        return momentum.mul_(beta).add_(grad, alpha=1.0 - beta)


def settled(variance: torch.Tensor, eps: float, *, inside: bool, correction: float = 1.0) -> torch.Tensor:
    """The denominator of a step, from a variance that no longer changes; a new tensor. Local.

    An element that had no gradient before has variance 0. Nothing says how large its steps should be, so it does not move:
    divided by `eps` alone, one gradient would throw it out of the range of all others.
    """
    return denominator(variance, eps, inside=inside, correction=correction).masked_fill_(variance == 0, torch.inf)


def denominator(variance: torch.Tensor, eps: float, *, inside: bool, correction: float = 1.0) -> torch.Tensor:
    """sqrt(variance / correction) + eps, or with `inside` sqrt(variance / correction + eps); a new tensor. Local."""
    corrected = variance / correction if correction != 1.0 else variance
    return corrected.add(eps).sqrt_() if inside else corrected.sqrt().add_(eps)
