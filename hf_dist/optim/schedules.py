"""Learning-rate schedules of the `scheduler` section: DeepSpeed's warm-ups, or any torch schedule by its class name.

Source of the formulas: DeepSpeed runtime/lr_schedules.py. [Note: schedule index] in `indexed_schedule.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from hf_dist.config.params import read_scheduler
from hf_dist.log import warn
from hf_dist.optim.build import construct
from hf_dist.optim.cycles import LRRangeTest, OneCycle
from hf_dist.optim.indexed_schedule import IndexedSchedule, count, number, per_group, problem

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "build_scheduler"]


class _Warmup(IndexedSchedule):
    """The index, the warm-up factor and the state that the three schedules share.

    A subclass sets its own attributes, calls this constructor last, and gives the learning rates in `_lr_at`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise problem("warmup_type", warmup_type, 'is not "log" or "linear"', 'DeepSpeed would use "log".')
        num_steps = count("warmup_num_steps", warmup_num_steps)
        self._has_warmup = num_steps > 0
        self._num_warmup_steps = max(2, num_steps) if self._has_warmup else 0  # ln(1) would divide by zero
        self._is_log = warmup_type == "log"
        if not self._has_warmup:
            warn("scheduler.params.warmup_num_steps: 0 means no warm-up here; DeepSpeed refuses it")
        super().__init__(optimizer, last_batch_iteration)

    def _is_first_step(self, index: int) -> bool:
        return index < 0 and self._has_warmup

    def _warmup_factor(self, index: int) -> float:
        """Progress of the warm-up at `index` < number of warm-up steps, from 0 to 1."""
        if self._is_log:
            return 1.0 / math.log(self._num_warmup_steps) * math.log(index + 1)
        return index / self._num_warmup_steps


class WarmupLR(_Warmup):
    """Warm-up from `warmup_min_lr` to `warmup_max_lr` (the optimizer's lr if None), then constant.

    Each may be a list with one value per param group. `warmup_num_steps` 0 means no warm-up.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        initial = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._min_lrs = per_group("warmup_min_lr", warmup_min_lr, len(initial))
        self._max_lrs = initial if warmup_max_lr is None else per_group("warmup_max_lr", warmup_max_lr, len(initial))
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def _lr_at(self, index: int) -> list[float]:
        if self._is_first_step(index):
            return list(self._min_lrs)
        is_warm = index >= self._num_warmup_steps
        factor = self._decay_factor(index) if is_warm or not self._has_warmup else self._warmup_factor(index)
        return [low + (high - low) * factor for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]

    def _decay_factor(self, index: int) -> float:
        """Position between minimum (0) and maximum (1) after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear decay that reaches `warmup_min_lr` (not 0) after `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_num_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _decay_factor(self, index: int) -> float:
        num_left = self._total_num_steps - index
        # The upper bound only matters without a warm-up, where the index starts at -1.
        return min(1.0, max(0.0, num_left / max(1.0, self._total_num_steps - self._num_warmup_steps)))


class WarmupCosineLR(_Warmup):
    """Warm-up from `warmup_min_ratio` to 1, then a cosine down to `cos_min_ratio`; both are factors of the optimizer's lr.

    As in DeepSpeed, the very first step runs at 0, whatever `warmup_min_ratio` is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_num_steps = _total(total_num_steps, warmup_num_steps)
        self._warmup_min_ratio = number("warmup_min_ratio", warmup_min_ratio)
        self._cos_min_ratio = number("cos_min_ratio", cos_min_ratio)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def _lr_at(self, index: int) -> list[float]:
        ratio = 0.0 if self._is_first_step(index) else self._ratio(index)
        return [float(base) * ratio for base in self.base_lrs]

    def _ratio(self, index: int) -> float:
        if self._has_warmup and index < self._num_warmup_steps:
            return self._warmup_min_ratio + (1.0 - self._warmup_min_ratio) * self._warmup_factor(index)
        num_done = index - self._num_warmup_steps + 1
        progress = min(1.0, num_done / max(1, self._total_num_steps - self._num_warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._cos_min_ratio + (1.0 - self._cos_min_ratio) * cosine)


_OWN: dict[str, type[IndexedSchedule]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def build_scheduler(type: str, params: Mapping[str, object], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that `scheduler.type` and `scheduler.params` stand for in DeepSpeed.

    It sets the learning rate of `optimizer` at once. Call its `step()` after each applied optimizer step, but not after
    one skipped for an overflow. `params` must not contain "auto".

    Raises:
        ConfigError: an unknown type, or params that it does not take; lists all of them.
    """
    name, arguments = read_scheduler(type, params)
    cls = _OWN[name] if name in _OWN else getattr(torch.optim.lr_scheduler, name)
    made: torch.optim.lr_scheduler.LRScheduler = construct("scheduler", cls, optimizer, arguments)
    return made


def _total(total_num_steps: object, warmup_num_steps: object) -> int:
    total = count("total_num_steps", total_num_steps)
    if total < count("warmup_num_steps", warmup_num_steps):
        warn(
            f"scheduler.params.total_num_steps: {total} is less than warmup_num_steps: {warmup_num_steps}, so training ends in "
            "the warm-up"
        )
    return total
