"""Optimizers that know their parameters by more than `params`, several optimizers of one model, loops over param groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import hf_dist
from hf_dist.errors import ModelError
from tests.window.nets import Blocks, batch, config, loss_of, weights

STEPS = 3


class Stepper(torch.optim.Optimizer):
    """A base: subclasses give the rate of one parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.rate(p, index, group))

    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return 1.0


class ByIndex(Stepper):
    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return 0.8 ** (len(group["params"]) - index)


class ByList(Stepper):
    """The rates of a list beside `params`."""

    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return float(group["rates"][index]) if "rates" in group else 1.0


class ByAttribute(Stepper):
    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return float(getattr(p, "lr_scale", 1.0))


class ByIds(Stepper):
    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.fast = {id(p) for p in self.param_groups[0]["params"][:3]}

    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return 3.0 if id(p) in self.fast else 1.0


class ByKey(Stepper):
    """A dict with the parameters as keys, which must all be there."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.rates = {p: 1.0 + n for n, p in enumerate(self.param_groups[0]["params"])}

    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return self.rates[p]


class ByState(Stepper):
    """A constructor without `params`; matrices are told by a flag in the state, and stepped as matrices."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        super().__init__([*matrices, *others])
        for p in self.param_groups[0]["params"]:
            self.state[p]["whole"] = any(p is m for m in matrices)

    def rate(self, p: torch.Tensor, index: int, group: dict[str, Any]) -> float:
        return 1.0 / p.grad.norm().item() if self.state[p]["whole"] else 1.0


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer, and remembers the weights of two steps ago."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count, self.slow = inner, 0, dict[Any, torch.Tensor]()
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        vars(self).update({key: value for key, value in vars(inner).items() if key.startswith("_")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or {p: p.clone() for p in params}
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p in params:
                self.slow[p].add_(p - self.slow[p], alpha=0.5)
                p.copy_(self.slow[p])


class Assigning(Stepper):
    """`p.data = ...` instead of an operation in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def by_list(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return ByList([{"params": params, "rates": [1.0 + 0.5 * n for n in range(len(params))]}])


def by_list_with_frozen(model: nn.Module) -> torch.optim.Optimizer:
    for p in list(model.parameters())[1:4]:
        p.requires_grad_(False)
    return by_list(model)


def by_attribute(model: nn.Module) -> torch.optim.Optimizer:
    for n, p in enumerate(model.parameters()):
        p.lr_scale = 0.5 + n  # type: ignore[attr-defined]
    return ByAttribute(model.parameters())


def by_state(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return ByState([p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2])


KNOWN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "index": lambda model: ByIndex(model.parameters()),
    "list": by_list,
    "list with frozen parameters": by_list_with_frozen,
    "attribute": by_attribute,
    "ids": lambda model: ByIds(model.parameters()),
    "keys": lambda model: ByKey(model.parameters()),
    "flags in the state": by_state,
    "wrapping": lambda model: Wrapping(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)),
    "assigning": lambda model: Assigning(model.parameters()),
}
"""What an optimizer may know of its parameters."""


def split(model: Any) -> list[list[nn.Parameter]]:
    """The parameters of the blocks, and the others."""
    inside = {id(p) for p in model.blocks.parameters()}
    return [[p for p in model.parameters() if (id(p) in inside) is side] for side in (True, False)]


def two(model: Any) -> list[torch.optim.Optimizer]:
    """An optimizer for the blocks and one for the rest."""
    blocks, rest = split(model)
    return [torch.optim.SGD(blocks, lr=0.01, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


Loop = Callable[[Any, list[Any], Callable[[int], torch.Tensor]], None]


def both(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    for i in range(STEPS):
        loss(i).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_after_the_other(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    for i in range(STEPS):
        loss(i).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_turn(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    for i in range(2 * STEPS):
        loss(i).backward()
        optimizers[i % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_accumulates(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    """The second optimizer steps every other time, with the sum of two gradients."""
    for i in range(2 * STEPS):
        loss(i).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        if i % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()


def zeroed_in_place(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    for i in range(STEPS):
        loss(i).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


LOOPS: dict[str, Loop] = {f.__name__: f for f in (both, one_after_the_other, in_turn, one_accumulates, zeroed_in_place)}


def clip_groups(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    (optimizer,) = optimizers
    for i in range(STEPS):
        loss(i).backward()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        assert sum(p.numel() for p in params) == sum(p.numel() for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        for p in params[:3]:
            p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def drop_through_groups(model: Any, optimizers: list[Any], loss: Callable[[int], torch.Tensor]) -> None:
    (optimizer,) = optimizers
    for i in range(STEPS):
        loss(i).backward()
        for p in optimizer.param_groups[0]["params"][2:]:
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()


GROUPS: dict[str, Loop] = {f.__name__: f for f in (clip_groups, drop_through_groups)}


def on_torch(make: Callable[[Any], Any], loop: Loop, world: int) -> torch.Tensor:
    """The weights after the loop in one process, on the joined batch."""
    model = Blocks()
    made = make(model)
    loop(model, made if isinstance(made, list) else [made], lambda i: loss_of(model, batch(i, 4 * world)))
    return weights(model)


def prepared(make: Callable[[Any], Any], loop: Loop, rank: int, world: int, settings: dict[str, Any]) -> torch.Tensor:
    """The same on these ranks, half of the cases through accelerate's calls."""
    model: Any = Blocks()
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    kept: Any
    if loop in (both, in_turn, clip_groups):
        kept = hf_dist.DistAccelerator(dist_config=settings)
        model, *optimizers = kept.prepare(model, *optimizers)
    else:
        kept = hf_dist.initialize(model, config=settings, optimizer=made)
    loop(model, optimizers, lambda i: loss_of(model, batch(i, 4 * world)[4 * rank : 4 * rank + 4]))
    engine = kept.engine if isinstance(kept, hf_dist.DistAccelerator) else kept
    assert engine.global_steps == (2 * STEPS if loop in (in_turn, one_accumulates) else STEPS)
    return weights(model)


def cases() -> dict[str, tuple[Callable[[Any], Any], Loop]]:
    """All of them, by name."""
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # noqa: E731
    return {
        **{f"known by {name}": (make, one_after_the_other) for name, make in KNOWN.items()},
        **{f"two, {name}": (two, loop) for name, loop in LOOPS.items()},
        **{name: (sgd, loop) for name, loop in GROUPS.items()},
    }


def on_ranks(rank: int, world: int, asked: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    """Weights by case and stage, or the error."""
    found: dict[tuple[str, int], Any] = {}
    for name, stage in asked:
        make, loop = cases()[name]
        try:
            found[name, stage] = prepared(make, loop, rank, world, config(stage))
        except ModelError as error:
            found[name, stage] = str(error)
    return found


def saved_by_two(rank: int, world: int, folder: str, stage: int) -> torch.Tensor:
    """Two optimizers, saved after two steps; the weights after two more."""
    model, engine = _two_engines(stage)
    _steps(engine, model, rank, world, 0)
    engine.save_checkpoint(folder)
    _steps(engine, model, rank, world, 2)
    return weights(model)


def resumed_by_two(rank: int, world: int, folder: str, stage: int) -> torch.Tensor:
    """The same from the checkpoint, in another layout."""
    model, engine = _two_engines(stage)
    engine.load_checkpoint(folder)
    _steps(engine, model, rank, world, 2)
    return weights(model)


def _two_engines(stage: int) -> tuple[Any, Any]:
    model = Blocks()
    return model, hf_dist.initialize(model, config=config(stage), optimizer=two(model))


def _steps(engine: Any, model: Any, rank: int, world: int, first: int) -> None:
    size = 8 // world
    for i in range(first, first + 2):
        engine.backward(loss_of(model, batch(i, 8)[size * rank : size * rank + size]))
        engine.step()
