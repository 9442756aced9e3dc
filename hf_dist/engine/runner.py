"""Runners of the model: backward, a window of microbatches, an evaluation. The engine chooses one when it is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from hf_dist.dist.ranges import named
from hf_dist.engine.window import Window, backward_of

__all__ = ["Runner", "Step", "Whole"]

Step = Callable[[nn.Module, object], torch.Tensor]
"""`step(model, microbatch)` runs the model once, calls `Engine.backward` with the loss and returns the value to report, 0D."""


class Runner(Protocol):
    """How one rank runs its microbatches, forward and backward."""

    takes_windows: bool
    """Whether a window's microbatches run together, so that none starts before the last one has been read."""

    def backward(self, loss: torch.Tensor, loss_scale: float, *, retain_graph: bool) -> None:
        """Backward of a loss that includes `loss_scale`. Raises `ModelError` if the runner runs only whole windows."""

    def run_window(self, microbatches: Sequence[object], step: Step, *, loss_scale: float, number: int) -> torch.Tensor:
        """Forward and backward of a window; returns the sum of `step`'s results, 0D. `number`: of the optimizer step."""

    def evaluate(self, batch: object, function: Callable[[nn.Module, object], object]) -> object:
        """The result of `function(model, batch)`, without gradient, on every rank. Every rank calls it."""

    def from_last(self, value: object) -> object:
        """The `value` of the rank that computes the loss, on all ranks of its pipeline. Collective over pp."""


class Whole:
    """Runs a model whose forward is one call."""

    takes_windows = False

    def __init__(self, model: nn.Module, window: Window) -> None:
        """`window`: receives the announcement of the last microbatch."""
        self._model = model
        self._window = window

    def backward(self, loss: torch.Tensor, loss_scale: float, *, retain_graph: bool) -> None:
        """Run the backward at once."""
        with named("backward"), backward_of(loss_scale):
            loss.backward(retain_graph=retain_graph)

    def run_window(self, microbatches: Sequence[object], step: Step, *, loss_scale: float, number: int) -> torch.Tensor:
        """Run the microbatches one after another."""
        reported = []
        for i, microbatch in enumerate(microbatches):
            with self._window.announce(i + 1 == len(microbatches)):
                reported.append(step(self._model, microbatch).detach().float())  # a sum in bf16 would lose digits
        return torch.stack(reported).sum()

    def evaluate(self, batch: object, function: Callable[[nn.Module, object], object]) -> object:
        """Call `function` on the model without gradient."""
        with torch.no_grad():
            return function(self._model, batch)

    def from_last(self, value: object) -> object:
        """Return `value`: every rank has its own loss. Local."""
        return value
