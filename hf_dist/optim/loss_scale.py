"""The fp16 loss scale: multiplied into the loss, divided out of the gradients, moved by their overflows.

Source: DeepSpeed runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hf_dist.errors import ConfigError, OverflowAtMinimumScaleError, Problem

__all__ = ["DynamicLossScaler", "Fp16Settings"]

# Below the smallest normal fp32 number, a scaled loss is zero: lowering the scale further cannot end an overflow.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

_FACTOR = 2.0


class Fp16Settings(Protocol):
    """The keys of the `fp16` section that the scaler reads."""

    @property
    def loss_scale(self) -> float:
        """`fp16.loss_scale`: a fixed scale, or 0 for a dynamic one."""

    @property
    def initial_scale_power(self) -> int:
        """`fp16.initial_scale_power`: the dynamic scale starts at 2 to this power."""

    @property
    def loss_scale_window(self) -> int:
        """`fp16.loss_scale_window`: steps without overflow before the scale doubles."""

    @property
    def hysteresis(self) -> int:
        """`fp16.hysteresis`: number of the overflow that first lowers the scale, counted from 1."""

    @property
    def consecutive_hysteresis(self) -> bool:
        """`fp16.consecutive_hysteresis`: whether any good step restores the hysteresis."""

    @property
    def min_loss_scale(self) -> float:
        """`fp16.min_loss_scale`: a further overflow at this scale is an error; may be a fraction or 0."""


class DynamicLossScaler:
    """The current loss scale, and how an overflow (or its absence) moves it.

    Every rank holds one and calls `update` once per step with the same `overflow`, on which all ranks have agreed.
    With `dynamic=False`, the scale never moves.
    """

    def __init__(
        self,
        scale: float,
        window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        *,
        dynamic: bool = True,
    ) -> None:
        _refuse_impossible(scale, window, min_scale, hysteresis)
        self.scale = float(scale)
        self.dynamic = dynamic
        self._scale_window = window
        self._min_scale = max(float(min_scale), _SMALLEST_SCALE)
        self._hysteresis = hysteresis
        self._consecutive_hysteresis = consecutive_hysteresis
        self._overflows_left = hysteresis  # the scale falls at an overflow while this is 1
        self._num_updates = 0
        self._last_overflow = -1
        self.initial_state = self.state_dict()
        """State to load from a checkpoint without a scaler state."""

    @classmethod
    def from_config(cls, fp16: Fp16Settings) -> DynamicLossScaler:
        """The scaler of the `fp16` section; `loss_scale` other than 0 makes it static."""
        return cls(
            scale=fp16.loss_scale or _FACTOR**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            min_scale=fp16.min_loss_scale,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            dynamic=fp16.loss_scale == 0,
        )

    def update(self, overflow: bool) -> None:
        """Move the scale after a step; `overflow`: whether the step's gradients held an inf or a nan.

        Raises:
            OverflowAtMinimumScaleError: an overflow that would lower the scale below its minimum.
        """
        if not self.dynamic:
            return
        if overflow:
            self._lower()
            self._last_overflow = self._num_updates
        else:
            self._raise_after_window()
        self._num_updates += 1

    def _lower(self) -> None:
        if self._overflows_left > 1:
            self._overflows_left -= 1
            return
        if self.scale <= self._min_scale:
            raise OverflowAtMinimumScaleError(
                f"fp16 gradients overflowed at loss scale {self.scale:g}, the minimum (fp16.min_loss_scale). "
                "No scale helps gradients that are inf or nan by themselves. Look for nan in the loss and the data, "
                'lower the learning rate, or train in bf16 ("bf16": {"enabled": true}). '
                "If the loss is finite, lower fp16.min_loss_scale."
            )
        self.scale = max(self.scale / _FACTOR, self._min_scale)

    def _raise_after_window(self) -> None:
        num_good = self._num_updates - self._last_overflow - 1  # excludes this step, so the first window is one longer
        window_is_full = num_good > 0 and num_good % self._scale_window == 0
        if self._consecutive_hysteresis or window_is_full:
            self._overflows_left = self._hysteresis
        if window_is_full:
            self.scale *= _FACTOR

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, from which `load_state_dict` continues as if the run had not stopped."""
        return {
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "num_updates": self._num_updates,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`; a static scaler keeps the scale of its configuration."""
        if not self.dynamic:
            return
        self.scale = float(state["scale"])
        self._overflows_left = int(state["overflows_left"])
        self._num_updates = int(state["num_updates"])
        self._last_overflow = int(state["last_overflow"])


def _refuse_impossible(scale: float, window: int, min_scale: float, hysteresis: int) -> None:
    wanted = [
        ("loss_scale", scale, scale > 0, "is not a number > 0 (or 0 for a dynamic scale)"),
        ("loss_scale_window", window, window >= 1, "is not an integer >= 1"),
        ("min_loss_scale", min_scale, min_scale >= 0, "is not a number >= 0"),
        ("hysteresis", hysteresis, hysteresis >= 1, "is not an integer >= 1"),
    ]
    problems = [
        Problem(f"fp16.{key}", repr(value), expected, "") for key, value, is_ok, expected in wanted if not is_ok
    ]
    if problems:
        raise ConfigError(problems)
