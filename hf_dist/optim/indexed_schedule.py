"""Base of DeepSpeed's schedules: the index, resumable progress, and checks of their arguments.

[Note: schedule index] DeepSpeed's index is -1 when the schedule is built and grows by one per `step()`, which runs
after each applied optimizer step. So steps 0 and 1 of a warm-up both run at its minimum. torch's `last_epoch` is 0 when that
index is -1; all code here uses DeepSpeed's index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hf_dist.errors import ConfigError, Problem

__all__ = ["IndexedSchedule", "count", "number", "per_group", "problem"]


class IndexedSchedule(LRScheduler):
    """A schedule whose learning rates are a function of the index alone.

    A subclass sets its own attributes, calls this constructor last, and gives the learning rates in `_lr_at`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # torch requires it for a resumed schedule
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    def _lr_at(self, index: int) -> list[float]:
        """The learning rate of each param group; index as in [Note: schedule index]."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each param group for the next optimizer step; a function of the step count alone."""
        return [*self._lr_at(self.last_epoch - 1)]

    def state_dict(self) -> dict[str, object]:
        """Progress only, as in DeepSpeed: a run resumed with another configuration follows the new one."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, and set the optimizer's learning rates for that point."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def problem(key: str, value: object, expected: str, fix: str = "") -> ConfigError:
    """The error for one key of `scheduler.params`."""
    return ConfigError(Problem(f"scheduler.params.{key}", repr(value), expected, fix))


def number(key: str, value: object) -> float:
    """`value` as a float. Raises `ConfigError` if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise problem(key, value, "is not a number")
    return float(value)


def count(key: str, value: object) -> int:
    """`value` as an int. Raises `ConfigError` if it is not an integer >= 0."""
    size = number(key, value)
    if size < 0 or size != int(size):
        raise problem(key, value, "is not an integer >= 0")
    return int(size)


def per_group(key: str, value: float | list[float], num_groups: int) -> list[float]:
    """One value for each param group, from a number or a list of `num_groups` numbers. Raises `ConfigError`."""
    if not isinstance(value, (list, tuple)):
        return [number(key, value)] * num_groups
    if len(value) != num_groups:
        raise problem(key, value, f"does not have one value for each of the {num_groups} param groups")
    return [number(key, v) for v in value]
