"""The loss scale moves as DeepSpeed's does, resumes anywhere, and says what to do when it cannot fall further."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.errors import ConfigError, OverflowAtMinimumScaleError
from hf_dist.optim.loss_scale import DynamicLossScaler

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["loss_scale"]


def _fp16(**changes: Any) -> SimpleNamespace:
    defaults = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize("trace", GOLDEN, ids=range(len(GOLDEN)))
def test_scale_moves_as_recorded_from_deepspeed(trace: dict[str, Any]) -> None:
    args = trace["args"]
    scaler = DynamicLossScaler(
        args["init_scale"],
        args["scale_window"],
        args["min_scale"],
        args["delayed_shift"],
        args["consecutive_hysteresis"],
    )
    before: list[float | str] = []
    for overflow in trace["overflow"]:
        before.append(scaler.scale)
        try:
            scaler.update(overflow)
        except OverflowAtMinimumScaleError:
            before.append("RAISES")
            break
    assert before == trace["scale_before"]
    assert scaler.scale == trace["scale_after"]


@settings(max_examples=50, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    num_done=st.integers(0, 40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_a_run_resumed_at_any_step_has_the_same_scales(
    overflows: list[bool], num_done: int, window: int, hysteresis: int, consecutive: bool
) -> None:
    def scaler() -> DynamicLossScaler:
        return DynamicLossScaler(2.0**16, window, 0.0, hysteresis, consecutive)

    straight, resumed = scaler(), scaler()
    for n, overflow in enumerate(overflows):
        if n == num_done:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = scaler()
            resumed.load_state_dict(state)
        straight.update(overflow)
        resumed.update(overflow)
        assert resumed.scale == straight.scale


def test_from_config_starts_at_the_given_power_of_two() -> None:
    assert DynamicLossScaler.from_config(_fp16(initial_scale_power=32)).scale == 2.0**32


def test_a_static_scale_never_moves_nor_raises() -> None:
    scaler = DynamicLossScaler.from_config(_fp16(loss_scale=512, min_loss_scale=512, loss_scale_window=1))
    for overflow in (True, True, True, False, False, False):
        scaler.update(overflow)
    scaler.load_state_dict(DynamicLossScaler(4.0).state_dict())
    assert scaler.scale == 512.0
    assert not scaler.dynamic


def test_a_fractional_minimum_is_reached_before_it_raises() -> None:
    scaler = DynamicLossScaler.from_config(_fp16(initial_scale_power=0, hysteresis=1, min_loss_scale=0.3))
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 0.3
    with pytest.raises(OverflowAtMinimumScaleError, match=r"loss scale 0\.3.*min_loss_scale.*bf16"):
        scaler.update(True)


def test_a_minimum_of_zero_still_ends_an_endless_overflow() -> None:
    scaler = DynamicLossScaler.from_config(_fp16(hysteresis=1, min_loss_scale=0))
    with pytest.raises(OverflowAtMinimumScaleError):
        for _ in range(1000):
            scaler.update(True)
    assert scaler.scale > 0.0


def test_impossible_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        DynamicLossScaler.from_config(_fp16(loss_scale=-1, loss_scale_window=0, hysteresis=0, min_loss_scale=-1))
    assert [problem.path for problem in caught.value.problems] == [
        "fp16.loss_scale",
        "fp16.loss_scale_window",
        "fp16.min_loss_scale",
        "fp16.hysteresis",
    ]
