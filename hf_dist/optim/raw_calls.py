"""Redirects a user's own calls of a torch optimizer that steps fragments: `step`, `zero_grad`, `add_param_group`.

Fragments have gradients only while the engine lends them. Without the redirection, a loop that keeps the plain optimizer would
silently step nothing, drop nothing, and not train any group that it adds.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch

from hf_dist.errors import ModelError
from hf_dist.optim.stand_in import OwnCalls


class RawCalls(ABC):
    """Handles redirected calls of a torch optimizer; the engine is one."""

    @abstractmethod
    def stepped_by_hand(self, closure: Callable[[], object] | None, optimizer: torch.optim.Optimizer) -> object:
        """Handle `optimizer.step(closure)`; returns the closure's result."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the gradients that `optimizer` steps, or set them to zero."""

    @abstractmethod
    def add_param_group(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the parameters of its newest group."""


class StepHook:
    """Pre-hook of an optimizer's step: turns a user's call into a step of the engine."""

    def __init__(self, engine: RawCalls, optimizer: torch.optim.Optimizer, calls: OwnCalls) -> None:
        """`calls`: of the engine itself, which are let through."""
        self._engine = weakref.ref(engine)
        self._of = weakref.ref(optimizer)
        self._calls = calls
        self._end_of_call: Callable[[], None] | None = None

    @property
    def engine(self) -> RawCalls | None:
        """The engine, while it exists."""
        return self._engine()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._end_of_call is not None and optimizer is self._of():  # the last call raised after the engine's step
            self._end_of_call()
        if self._calls.running:
            return None
        engine = self.engine
        if engine is None:
            raise ModelError(
                f"{type(optimizer).__name__}.step(): the engine that steps it is gone, so nothing would be trained. "
                "Keep what hf_dist.initialize returns (engine = hf_dist.initialize(model, ...)) for as long as you train; to "
                "train on without hf_dist, make a new optimizer over model.parameters()."
            )
        given = [*args[1:], *kwargs.values()]  # the first is the optimizer itself
        value = engine.stepped_by_hand(given[0] if given else None, optimizer)
        return (self._returning(optimizer), *([lambda: value] if given else [])), {}

    def _returning(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What the rest of the user's call runs on, so that it changes nothing and returns the closure's result.

        A copy without parameters: counters of the class, which the engine's step has moved, do not move twice. Hooks have run.
        """
        hooks = optimizer._optimizer_step_post_hooks
        self._calls.running = True

        def end(*_: object) -> None:
            self._calls.running, self._end_of_call = False, None
            optimizer._optimizer_step_post_hooks = hooks

        self._end_of_call = end
        optimizer._optimizer_step_post_hooks = OrderedDict({0: end})
        empty: Any = object.__new__(type(optimizer))
        vars(empty).update(vars(optimizer))
        empty.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        return cast(torch.optim.Optimizer, empty)


def route(optimizer: torch.optim.Optimizer, engine: RawCalls, calls: OwnCalls) -> None:
    """Redirect user code's calls of `optimizer` to `engine`, which is held weakly. Local."""
    reference = weakref.ref(engine)
    kind: Any = type(optimizer)
    held = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        found, own = reference(), held()
        if found is not None and own is not None:
            found.zero_grad(set_to_none, own)
        with calls.marked():  # the gradients are gone: what is left is what else the class does
            kind.zero_grad(own, set_to_none)

    def add_param_group(param_group: dict[str, object]) -> None:
        found, own = reference(), held()
        kind.add_param_group(own, param_group)
        if found is not None and own is not None:
            found.add_param_group(own)

    own: Any = optimizer
    own.zero_grad = zero_grad
    own.add_param_group = add_param_group
    own._patch_step_function()  # a class that wraps another may not have called torch's constructor, which does it
    handle = optimizer.register_step_pre_hook(StepHook(engine, optimizer, calls))
    own._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # the engine's step runs the others


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code has hooks on the steps of `optimizer`."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(not isinstance(hook, StepHook) for hook in hooks)


def engine_of(optimizer: torch.optim.Optimizer) -> RawCalls | None:
    """The engine that steps `optimizer`, if any does."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook.engine for hook in hooks if isinstance(hook, StepHook)), None)
