"""Who runs the model: forward, backward, a window of microbatches, an evaluation. Chosen once, when the engine is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hf_dist.window import Window, backward_of

__all__ = ["Runner", "Step", "Whole"]

Step = Callable[[nn.Module, Any], torch.Tensor]
"""`step(model, microbatch)` runs the model once, has `Engine.backward` called with the loss, returns what is reported, 0D."""


class Runner(Protocol):
    """How the microbatches of one rank come to their gradients."""

    takes_windows: bool
    """Whether the microbatches of a window are run together: none before the last one is there."""

    def backward(self, loss: torch.Tensor, loss_scale: float, *, retain_graph: bool) -> None:
        """Backward of a loss that holds `loss_scale`. Raises `ModelError` where only whole windows are run."""

    def run_window(self, microbatches: Sequence[Any], step: Step, *, loss_scale: float, number: int) -> torch.Tensor:
        """Forward and backward of a window; the sum of what `step` returns, 0D. `number`: of the optimizer step."""

    def evaluate(self, batch: Any, function: Callable[[nn.Module, Any], Any]) -> Any:
        """`function(model, batch)` without gradient, its result on every rank."""

    def from_last(self, value: Any) -> Any:
        """`value` of the rank that has the loss, on every rank that runs the model with it; each of them calls it."""


class Whole:
    """A model whose forward is one call."""

    takes_windows = False

    def __init__(self, model: nn.Module, window: Window) -> None:
        """`window`: is told which microbatch is the last."""
        self._model = model
        self._window = window

    def backward(self, loss: torch.Tensor, loss_scale: float, *, retain_graph: bool) -> None:
        """At once."""
        with backward_of(loss_scale):
            loss.backward(retain_graph=retain_graph)

    def run_window(self, microbatches: Sequence[Any], step: Step, *, loss_scale: float, number: int) -> torch.Tensor:
        """One after the other."""
        reported = []
        for i, microbatch in enumerate(microbatches):
            with self._window.announce(i + 1 == len(microbatches)):
                reported.append(step(self._model, microbatch).detach().float())  # a sum in bf16 would lose digits
        return torch.stack(reported).sum()

    def evaluate(self, batch: Any, function: Callable[[nn.Module, Any], Any]) -> Any:
        """As it stands."""
        with torch.no_grad():
            return function(self._model, batch)

    def from_last(self, value: Any) -> Any:
        """Its own."""
        return value
