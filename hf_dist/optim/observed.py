"""Steps copies of a user's own optimizer on small tensors, as two ranks would step it, and compares with one process.

The copies have its class, groups, options, attributes and what it knows of each parameter, so a class whose constructor takes
more than parameters and options is observed too, and one that uses the place of a parameter in its group.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.optim.known_by import follow, knows_more
from hf_dist.optim.stand_in import OwnCalls, StandIn, lend
from hf_dist.sharding.prepared import raw_data

__all__ = ["CannotObserve", "Parts", "as_fragments", "as_wholes", "one_process", "stepped_as"]

_NUM_STEPS = 3
_SHAPES = ((24,), (24,), (6, 4), (2, 3, 4))
"""By the number of dimensions."""
_FIRST, _LAST = 6, 2
"""Parameters of each group that are observed, if the class knows nothing of the others."""
_REDIRECTED = ("step", "zero_grad", "add_param_group")
"""Methods that others may have replaced on an instance: a schedule counts steps."""

Parts = Callable[[int], tuple[int, int] | None]
"""Number of a parameter -> this rank's elements of it, or None for all of them in the parameter's shape."""


class CannotObserve(Exception):
    """The copy cannot be stepped, so nothing is known."""


def one_process(number: int) -> tuple[int, int] | None:
    """Every tensor is whole."""
    return None


def as_fragments(rank: int) -> Parts:
    """Of two ranks, each holds half of some tensors, all of others, nothing of the rest."""
    return lambda n: ((0, 12), (12, 24))[rank] if n % 3 == 0 else ((0, 24) if n % 3 == 1 + rank else (0, 0))


def as_wholes(rank: int) -> Parts:
    """Of two ranks, each owns every other tensor."""
    return lambda n: None if n % 2 == rank else (0, 0)


def stepped_as(
    optimizer: torch.optim.Optimizer, parts: Parts, *, keeps_places: bool = True, steps: int = _NUM_STEPS
) -> dict[int, torch.Tensor]:
    """Number of a parameter -> its elements, 1-D, after a copy has stepped as a rank with these `parts`. Local.

    `keeps_places`: parameters of which the rank has no elements stay in their groups. Raises `CannotObserve`.
    """
    groups = [_chosen(group["params"], knows_more(optimizer)) for group in optimizer.param_groups]
    numbered = list(enumerate(p for group in groups for p in group))
    calls = OwnCalls()
    # A frozen parameter is whole in one process, and has no elements on a rank that steps none of it.
    held = {n: parts(n) if p.requires_grad or parts is one_process else (0, 0) for n, p in numbered}
    stands = {id(p): _stand_in(p, n, held[n], calls) for n, p in numbered}
    random = torch.random.fork_rng(devices=[])
    with random, calls.marked():
        torch.manual_seed(0)
        try:
            made = _Copier(stands).optimizer(optimizer, groups)
            follow(made, stands)
            if not keeps_places:
                for group in made.param_groups:
                    group["params"] = [p for p in group["params"] if p.is_stepped]
            if callable(getattr(made, "train", None)):
                made.train()
            for step in range(steps):
                for n, p in numbered:
                    lend(stands[id(p)], _gradient(p, n, step, held[n]))
                type(optimizer).step(made)
        except Exception as error:  # of a class that we know nothing of
            raise CannotObserve(f"{type(error).__name__}: {error}") from error
    return {n: raw_data(stands[id(p)]).reshape(-1) for n, p in numbered}


def _chosen(params: Sequence[nn.Parameter], all_of_them: bool) -> list[nn.Parameter]:
    few = len(params) <= _FIRST + _LAST
    return list(params) if all_of_them or few else [*params[:_FIRST], *params[-_LAST:]]


def _values(p: torch.Tensor, number: int) -> torch.Tensor:
    index = torch.arange(24, dtype=torch.float32, device="cpu")
    return torch.cos(1.7 * index + 0.3 + number).reshape(_SHAPES[min(p.dim(), 3)])


def _cut(whole: torch.Tensor, part: tuple[int, int] | None) -> torch.Tensor:
    return whole.clone() if part is None else whole.flatten()[slice(*part)].clone()


def _stand_in(p: nn.Parameter, number: int, part: tuple[int, int] | None, calls: OwnCalls) -> StandIn:
    return StandIn.of(p, _cut(_values(p, number), part), calls, is_stepped=p.requires_grad and part != (0, 0))


def _gradient(p: nn.Parameter, number: int, step: int, part: tuple[int, int] | None) -> torch.Tensor | None:
    if not p.requires_grad or part == (0, 0):
        return None
    index = torch.arange(24, dtype=torch.float32, device="cpu")
    # The halves grow at different rates, so that what is computed over a tensor differs between it and each half.
    growth = torch.where(index < 12, 3.0, 10.0) ** step
    whole = torch.sin((0.7 + 0.3 * step) * index + step + 0.5 + number) * growth * (1 + 0.5 * number)
    return _cut(whole.reshape(_SHAPES[min(p.dim(), 3)]), part)


class _Copier:
    """Copies an optimizer without its parameters, methods that others replaced, and hooks."""

    def __init__(self, stands: dict[int, StandIn]) -> None:
        self._stands: dict[int, Any] = dict(stands)
        self._made: dict[int, object] = {}

    def optimizer(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Any:
        """`groups`: the parameters of each group that are observed."""
        for group, chosen in zip(optimizer.param_groups, groups, strict=True):
            options = {key: self.copied(value) for key, value in group.items() if key != "params"}
            if isinstance(options.get("lr"), (int, float, torch.Tensor)):
                options["lr"] = 1.0  # warm-up may have set it to 0
            if options.get("capturable"):
                options["capturable"] = False  # works on accelerators only
            self._made[id(group)] = {"params": [self._stands[id(p)] for p in chosen], **options}
        for p, state in optimizer.state.items():
            if id(p) in self._stands:
                like = {key: _like_stand_in(value, p, self._stands[id(p)]) for key, value in state.items()}
                self._made[id(state)] = {key: self.copied(value) for key, value in like.items()}
        return self._instance(optimizer)

    def _instance(self, optimizer: torch.optim.Optimizer) -> object:
        made: object = type(optimizer).__new__(type(optimizer))
        self._made[id(optimizer)] = made
        for key, value in vars(optimizer).items():
            if key in _REDIRECTED:
                continue
            hooks = key.startswith("_optimizer_") and isinstance(value, OrderedDict)
            made.__dict__[key] = OrderedDict() if hooks else self.copied(value)
        return made

    def copied(self, value: object) -> object:
        """A copy in which stand-ins have the places of parameters."""
        if id(value) in self._made:
            return self._made[id(value)]
        if id(value) in self._stands:
            return self._stands[id(value)]
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if value.numel() <= 1 << 20 else value
        if isinstance(value, torch.optim.Optimizer):
            return self._instance(value)
        if isinstance(value, nn.Module):
            return _Unreadable()
        if isinstance(value, dict):
            made: Any = copy.copy(value)
            self._made[id(value)] = made
            made.clear()
            made.update({self.copied(key): self.copied(item) for key, item in value.items()})
            return made
        if isinstance(value, (list, set, frozenset, tuple)) and not hasattr(value, "_fields"):
            made = type(value)([self.copied(item) for item in value])
            self._made[id(value)] = made
            return made
        return value


class _Unreadable:
    """In place of a module that an optimizer holds: what it does with the module cannot be tried on small tensors."""

    def __getattr__(self, name: str) -> object:
        raise CannotObserve(f"it uses {name} of a module")


def _like_stand_in(value: object, p: torch.Tensor, stand: torch.Tensor) -> object:
    """A state that the optimizer made at construction, in the stand-in's shape: such states are constant."""
    if isinstance(value, torch.Tensor) and value.shape == p.shape and value.dim() > 0:
        return value.detach().reshape(-1)[:1].to("cpu", copy=True).expand(stand.shape).contiguous()
    return value
