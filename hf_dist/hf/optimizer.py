"""The optimizer that accelerate, HF schedulers and the Trainer see, and parameters that belong to no model."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.format_bytes import size_text
from hf_dist.log import say_once
from hf_dist.optim.attach import FragmentedOptimizer


class DistOptimizer(AcceleratedOptimizer):
    """Steps the engine instead of the bare optimizer; `param_groups` and `state` are the inner optimizer's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, max_norm: float = 0.0, beside: Beside | None = None
    ) -> None:
        """`max_norm`: clip to this norm even if the loop does not ask (`gradient_clipping` of the JSON). 0: no clipping."""
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self.beside = beside
        self._max_norm = max_norm
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """At the end of a window: clip, step, all-gather replicated weights. Every rank calls it.

        Raises `ModelError` if another optimizer of these parameters was prepared since.
        """
        if all(member.optimizer is not self.optimizer for member in self._members()):
            raise ModelError(
                f"{type(self.optimizer).__name__}.step(): {type(self.engine.optimizer).__name__} was prepared after it for the "
                "same parameters and has taken its place. Step the newer one, or give each parameter to one optimizer."
            )
        if self.gradient_state.sync_gradients:
            self.engine.stepped_by_hand(closure, self.optimizer, self._max_norm)
            self._is_overflow = self.engine.schedule_waits
            if self.beside is not None and not self.engine.step_was_skipped:
                self.beside.step()

    def _members(self) -> list[FragmentedOptimizer]:
        return [] if self.engine.fragments is None else self.engine.fragments.members

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the window's gradients."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad(set_to_none is not False, self.optimizer)
            if self.beside is not None:
                self.beside.zero_grad()

    def train(self) -> None:
        """The inner optimizer's `train`, if any: schedule-free optimizers train on other weights. Every rank calls it."""
        self._switch("train")

    def eval(self) -> None:
        """The inner optimizer's `eval`, if it has one. Every rank calls it."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        # HF asks before each microbatch, which in a pipeline is in the middle of the schedule, where weights are in use.
        flags = [group.get("train_mode") for group in self.optimizer.param_groups]
        is_there = flags == [mode == "train"] * len(flags)
        if callable(getattr(self.optimizer, mode, None)) and not is_there:
            self.engine.switch_optimizer(mode, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """This rank's fragments of the optimizer state, by parameter name."""
        assert self.engine.fragments is not None
        return self.engine.fragments.of(self.optimizer).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank and layout."""
        assert self.engine.fragments is not None
        self.engine.fragments.of(self.optimizer).load_state_dict(state_dict)


class Beside:
    """Optimizer parameters that belong to a loss instead of a model. Each rank steps its own copy, as under DDP.

    DDP averages only the model's gradients, and the Trainer clips, zeroes and saves only the model's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, apart: set[int]) -> None:
        """Move the parameters with these ids from `optimizer` into a second one of the same class and options."""
        self._source = optimizer
        self._own: Any = copy.copy(optimizer)
        self._own._optimizer_step_pre_hooks = OrderedDict()
        self._own._optimizer_step_post_hooks = OrderedDict()
        self._own.state = defaultdict(dict)
        self._own.param_groups = []
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if id(p) in apart]
            self._own.param_groups.append({**group, "params": own})
            group["params"] = [p for p in group["params"] if id(p) not in apart]
            self._own.state.update({p: optimizer.state.pop(p) for p in own if p in optimizer.state})

    def step(self) -> None:
        """Step with the source's current options, because a schedule changes those. Local."""
        for group, source in zip(self._own.param_groups, self._source.param_groups, strict=False):
            group.update({key: value for key, value in source.items() if key != "params"})
        type(self._own).step(self._own)  # the class's: a schedule has wrapped the source's `step`, also in the copy

    def zero_grad(self) -> None:
        """Discard the gradients. Local."""
        for group in self._own.param_groups:
            for p in group["params"]:
                p.grad = None


def set_beside(optimizer: torch.optim.Optimizer, engine: Engine, modules: Iterable[nn.Module]) -> Beside | None:
    """The parameters of `modules` (those a Trainer has beside its model) that `optimizer` steps; None without any. Local.

    Raises `ModelError` under fp16, because these gradients would stay multiplied by the loss scale.
    """
    model = {id(m) for m in engine.model.modules()}
    others = {id(m): m for module in modules for m in module.modules() if id(m) not in model}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {id(p) for p in engine.model.parameters()}
    apart = {id(p): p for m in others.values() for p in m.parameters(recurse=False) if id(p) in stepped - held}
    if not apart:
        return None
    named = sorted({type(m).__name__ for m in modules})
    if engine.scaler is not None:
        raise ModelError(
            f"{', '.join(named)} has {len(apart)} parameters of its own, and their gradients would stay multiplied by the loss "
            "scale: train with bf16 instead of fp16"
        )
    for tensor in _tensors(others.values()):
        tensor.data = tensor.data.to(engine.device)
    nbytes = size_text(sum(p.nbytes for p in apart.values()))
    say_once(
        f"{', '.join(named)} has parameters of its own ({nbytes}): as under DDP, each rank trains its own copy of them, and "
        "checkpoints do not contain them"
    )
    return Beside(optimizer, set(apart))


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
