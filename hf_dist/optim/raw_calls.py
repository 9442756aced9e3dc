"""Redirects a user's own calls of a torch optimizer that steps fragments: `step`, `zero_grad`, `add_param_group`.

Fragments have gradients only while the engine lends them. Without the redirection, a loop that keeps the plain optimizer would
silently step nothing, drop nothing, and not train any group that it adds.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from hf_dist.errors import ModelError


class Engine(Protocol):
    """The engine that handles redirected calls."""

    def stepped_by_hand(self, closure: Any) -> Any:
        """Handle `optimizer.step(closure)`; returns the closure's result."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def add_param_group(self, options: dict[str, Any]) -> None:
        """Train the parameters of another group."""


class StepHook:
    """Pre-hook of an optimizer's step: turns a user's call into a step of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.is_own = False
        """Whether the engine itself is calling `step`."""

    @property
    def engine(self) -> Engine | None:
        """The engine, while it exists."""
        return self._engine()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.is_own:
            return None
        engine = self.engine
        if engine is None:
            raise ModelError(
                f"{type(optimizer).__name__}.step(): the engine that steps it is gone, so nothing would be trained. "
                "Keep what hf_dist.initialize returns (engine = hf_dist.initialize(model, ...)) for as long as you train; to "
                "train on without hf_dist, make a new optimizer over model.parameters()."
            )
        given = [*args[1:], *kwargs.values()]  # the first is the optimizer itself
        value = engine.stepped_by_hand(given[0] if given else None)
        # The optimizer's own step continues with fragments that have no gradient, and returns the closure's result.
        return (optimizer, *([lambda: value] if given else [])), {}


def route(optimizer: torch.optim.Optimizer, engine: Engine) -> StepHook:
    """Redirect user code's calls of `optimizer` to `engine`, which is held weakly. Local."""
    reference = weakref.ref(engine)
    kind: Any = type(optimizer)
    held = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        found = reference()
        if found is not None:
            found.zero_grad()
        kind.zero_grad(held(), set_to_none)

    def add_param_group(param_group: dict[str, Any]) -> None:
        found = reference()
        kind.add_param_group(held(), param_group)
        if found is not None:
            found.add_param_group(param_group)

    own: Any = optimizer
    own.zero_grad = zero_grad
    own.add_param_group = add_param_group
    hook = StepHook(engine)
    optimizer.register_step_pre_hook(hook)
    return hook


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code has hooks on the steps of `optimizer`."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(not isinstance(hook, StepHook) for hook in hooks)


def engine_of(optimizer: torch.optim.Optimizer) -> Engine | None:
    """The engine that steps `optimizer`, if any does."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook.engine for hook in hooks if isinstance(hook, StepHook)), None)
