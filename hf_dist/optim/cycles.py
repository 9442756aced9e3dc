"""DeepSpeed's OneCycle, which also moves momentum, and LRRangeTest, for finding a learning rate.

Source of the formulas: DeepSpeed runtime/lr_schedules.py; Smith 2018, arXiv 1803.09820, and 2017, arXiv 1506.01186.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_dist.log import warn
from hf_dist.optim.indexed_schedule import IndexedSchedule, count, number, per_group, problem

__all__ = ["LRRangeTest", "OneCycle"]


_SECOND_BETA = 0.99
"""DeepSpeed sets Adam's second decay to this while OneCycle moves the first."""


class LRRangeTest(IndexedSchedule):
    """Rises from `lr_range_test_min_lr` without bound, by `lr_range_test_step_rate` of it per `lr_range_test_step_size`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group("lr_range_test_min_lr", lr_range_test_min_lr, len(optimizer.param_groups))
        self._size = _at_least_one("lr_range_test_step_size", lr_range_test_step_size)
        self._rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self._is_staircase = bool(lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def _lr_at(self, index: int) -> list[float]:
        interval = (index + 1) / self._size
        factor = 1 + self._rate * (math.floor(interval) if self._is_staircase else interval)
        return [low * factor for low in self._min_lrs]


@dataclass(frozen=True)
class _Cycle:
    """Rises from 0 to 1 in `first` steps and falls back in `second`; in stairs, if their number is not 0."""

    first: float
    second: float
    first_stairs: int
    second_stairs: int

    @property
    def total(self) -> float:
        return self.first + self.second

    def height(self, index: int) -> float:
        """Height of the cycle at `index`, from 0 to 1."""
        done, peak = index + 1, self.first / self.total
        x = 1.0 + done / self.total - math.floor(1 + done / self.total)
        rises = x <= peak
        stairs = self.first_stairs if rises else self.second_stairs
        if stairs == 0:
            return x / peak if rises else (x - 1) / (peak - 1)
        # Computed from the whole number of steps: x is a rounded fraction that may fall just short of a stair.
        step = done % self.total
        position = step * stairs / self.first if step <= self.first else (self.total - step) * stairs / self.second
        return math.floor(position) / stairs


_ONE_CYCLE_DEFAULTS: dict[str, Any] = {
    "decay_lr_rate": 0.0,
    "cycle_first_step_size": 2000,
    "cycle_second_step_size": None,
    "cycle_first_stair_count": 0,
    "cycle_second_stair_count": None,
    "decay_step_size": 0,
    "cycle_momentum": True,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "last_batch_iteration": -1,
}


_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


class OneCycle(IndexedSchedule):
    """One cycle from `cycle_min_lr` to `cycle_max_lr` and back, then a decay; the first beta moves in the opposite direction.

    `cycle_second_step_size` None means the length of the first; likewise for stairs. `decay_step_size` 0 means no decay.
    """

    # DeepSpeed's thirteen arguments, for code that builds a schedule from JSON by signature.
    __signature__ = inspect.Signature(
        [inspect.Parameter(key, _KEYWORD) for key in ("optimizer", "cycle_min_lr", "cycle_max_lr")]
        + [inspect.Parameter(key, _KEYWORD, default=value) for key, value in _ONE_CYCLE_DEFAULTS.items()]
    )

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: Any, cycle_max_lr: Any, **params: object
    ) -> None:
        num_groups = len(optimizer.param_groups)
        self._min_lrs = per_group("cycle_min_lr", cycle_min_lr, num_groups)
        self._max_lrs = per_group("cycle_max_lr", cycle_max_lr, num_groups)
        values = {**_ONE_CYCLE_DEFAULTS, **params}
        first = _at_least_one("cycle_first_step_size", values["cycle_first_step_size"])
        stairs = count("cycle_first_stair_count", values["cycle_first_stair_count"])
        second, second_stairs = values["cycle_second_step_size"], values["cycle_second_stair_count"]
        self._cycle = _Cycle(
            float(first),
            float(first if second is None else count("cycle_second_step_size", second)),
            stairs,
            stairs if second_stairs is None else count("cycle_second_stair_count", second_stairs),
        )
        self._decay_size = count("decay_step_size", values["decay_step_size"])
        self._lr_rate = number("decay_lr_rate", values["decay_lr_rate"])
        self._momentum_rate = number("decay_mom_rate", values["decay_mom_rate"])
        self._min_momentums = per_group("cycle_min_mom", values["cycle_min_mom"], num_groups)
        self._max_momentums = per_group("cycle_max_mom", values["cycle_max_mom"], num_groups)
        self._moves_momentum = bool(values["cycle_momentum"])
        if self._moves_momentum and "betas" not in optimizer.defaults:
            warn("scheduler.params.cycle_momentum has no effect: the optimizer has no betas")
            self._moves_momentum = False
        super().__init__(optimizer, values["last_batch_iteration"])

    def step(self, epoch: int | None = None) -> None:
        """Call after each applied optimizer step: sets learning rates as in every schedule, then betas."""
        super().step(epoch)
        self._set_betas()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue from `state_dict()`, and set the optimizer's learning rates and betas for that point."""
        super().load_state_dict(state_dict)
        self._set_betas()

    def _lr_at(self, index: int) -> list[float]:
        if index < self._cycle.total:
            height = self._cycle.height(index)
            return [low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]
        factor = 1 + self._lr_rate * self._decayed(index)
        return [low / factor for low in self._min_lrs]

    def _momentum_at(self, index: int) -> list[float]:
        if index < 0:
            return self._min_momentums  # as in DeepSpeed before the first step, though the cycle begins at the maximum
        if index < self._cycle.total:
            height = self._cycle.height(index)
            pairs = zip(self._min_momentums, self._max_momentums, strict=True)
            return [high - (high - low) * height for low, high in pairs]
        factor = 1 + self._momentum_rate * self._decayed(index)
        return [high * factor for high in self._max_momentums]

    def _decayed(self, index: int) -> float:
        return (index - self._cycle.total + 1) / self._decay_size if self._decay_size else 0.0

    def _set_betas(self) -> None:
        if self._moves_momentum:
            momentums = self._momentum_at(self.last_epoch - 1)
            for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
                group["betas"] = (momentum, _SECOND_BETA)


def _at_least_one(key: str, value: object) -> int:
    size = count(key, value)
    if size < 1:
        raise problem(key, value, "is not at least 1")
    return size
