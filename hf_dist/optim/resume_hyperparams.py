"""Restores a saved optimizer's and schedule's options of param groups, progress and learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_dist.errors import CheckpointError
from hf_dist.log import warn_once
from hf_dist.optim.optimizers import Joint

__all__ = ["kind_of", "load_schedule", "saved_options", "take_options"]


def kind_of(optimizer: object) -> str:
    """The class of an optimizer, or the classes of several that are one object (`optimizers.Joint`)."""
    return optimizer.kind if isinstance(optimizer, Joint) else type(optimizer).__name__


def saved_options(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> dict[str, object]:
    """The input of `take_options`: class name, and options and parameter names of each param group. Local."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {"type": kind_of(optimizer), "param_groups": groups, "param_names": [list(own) for own in names]}


def take_options(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], saved: Mapping[str, Any] | None, where: object
) -> bool:
    """Give each param group the options of the saved group with its parameters; False, changing nothing, for another class.

    `names`: full parameter names of each group. Groups may be in another order and hold newly unfrozen parameters. Raises
    `CheckpointError` if parameters were grouped differently, because the learning rate would be ambiguous. Local.
    """
    if saved is None:
        return False
    now = kind_of(optimizer)
    if saved["type"] != now:
        warn_once(
            f"the checkpoint's optimizer is {saved['type']}, this run's is {now}: its state starts empty, and it keeps its own "
            f"learning rate and other options (from {where})"
        )
        return False
    options = saved["param_groups"]
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{where}: the optimizer had {len(options)} param groups, this one has {len(optimizer.param_groups)}; resume with "
            "the same optimizer settings"
        )
    sources = _sources(names, saved.get("param_names"), where)
    for group, source in zip(optimizer.param_groups, sources, strict=True):
        if source is not None:
            group.update(options[source])
    return True


def _sources(names: Sequence[Sequence[str]], saved: Sequence[Sequence[str]] | None, where: object) -> list[int | None]:
    """For each group, the number of the saved group with its parameters; None if all of them are new."""
    if saved is None:  # an old checkpoint without names
        return [*range(len(names))]
    of = {name: number for number, group in enumerate(saved) for name in group}
    found = [sorted({of[name] for name in group if name in of}) for group in names]
    taken = [number for numbers in found for number in numbers]
    for group, numbers in enumerate(found):
        others = len(numbers) > 1 or any(taken.count(number) > 1 for number in numbers)
        if others:
            raise CheckpointError(
                f"{where}: param group {group} holds parameters of the checkpoint's group(s) {', '.join(map(str, numbers))}, "
                "which this run divides differently, so the learning rate is ambiguous. Resume with the same param "
                "groups (in any order), or load only the weights (weights_only=True)."
            )
    return [numbers[0] if numbers else None for numbers in found]


def load_schedule(scheduler: Any, state: Mapping[str, object], *, own_options: bool) -> None:
    """Call `scheduler.load_state_dict(state)`, then continue from that point with the optimizer's own base rates. Local.

    `own_options`: the optimizer kept its own options (`take_options` returned False), so its rates must be set for that point.
    torch's schedules save their base rates and would restore the other optimizer's at the next step. Call `take_options` first.
    """
    scheduler.load_state_dict(state)
    _rebase(getattr(scheduler, "scheduler", scheduler), state, own_options)  # accelerate wraps


def _rebase(scheduler: Any, state: Mapping[str, Any], own_options: bool) -> None:
    for inner, its in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        _rebase(inner, its, own_options)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if not state.get("base_lrs") or any("initial_lr" not in group for group in groups):
        return  # its rates depend on its progress alone, or on nothing that was saved
    own = [group["initial_lr"] for group in groups]
    scheduler.base_lrs = own  # in the order of the groups, which may differ from the saved one
    if "_last_lr" not in state or not own_options:
        return
    # The rate at this point is the own base times saved rate / saved base; a saved base of 0 gives no ratio.
    factors = [rate / base if base else 1.0 for rate, base in zip(state["_last_lr"], state["base_lrs"], strict=True)]
    if len(factors) != len(own):
        factors = factors[:1] * len(own)
    scheduler._last_lr = [base * factor for base, factor in zip(own, factors, strict=True)]
    for group, rate in zip(groups, scheduler._last_lr, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
