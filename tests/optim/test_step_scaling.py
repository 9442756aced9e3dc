"""Clipping, unscaling and skipping on a step's own way through the gradients: the numbers of doing it first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.engine import window as window_module
from hf_dist.engine.engine import Engine
from hf_dist.engine.optimizer_step import OptimizerStep
from hf_dist.optim import skipped
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.skipped import SkippedSteps
from hf_dist.optim.step_scaling import StepScaling, takes_scaling

CLIPPING = 0.01


def engine_of(optimizer: str = "AdamW", **config: Any) -> Any:
    """A small model; gradients are a thousand times the clip."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    make = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
        "loop": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=False, foreach=False),
    }[optimizer]
    config = {"train_batch_size": 1, "gradient_clipping": CLIPPING, **config}
    schedule = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
    return hf_dist.initialize(model, config=config, optimizer=make(model.parameters()), lr_scheduler=schedule)


def backward(engine: Any, factor: float = 1.0, step: int = 0) -> None:
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(x).float().square().sum() * 10 * factor)


def weights(engine: Any) -> torch.Tensor:
    return torch.cat([g.source.clone() for g in engine.sharded.groups])


class _AtOnce(Optimizers):
    defers_clip = False  # type: ignore[assignment]


def clips_at_once(engine: Engine) -> None:
    """From now on products are computed when they are asked for."""
    engine.stepping.optimizers.__class__ = _AtOnce


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What gradients were multiplied by in a pass of its own."""
    found: list[Any] = []
    original = window_module.scale_gradients

    def counted(sharded: Any, factor: Any, chosen: Any = None) -> None:
        found.append(factor)
        original(sharded, factor, chosen)

    monkeypatch.setattr(window_module, "scale_gradients", counted)
    return found


def test_the_kernel_clips_as_a_pass_over_the_gradients_does(passes: list[Any]) -> None:
    engine, plain = engine_of(), engine_of()
    clips_at_once(plain)
    for step in range(4):
        for e in (engine, plain):
            backward(e, step=step)
            e.step()
        assert CLIPPING < engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=1e-6)
    assert len(passes) == 4, "those of the other engine"
    torch.testing.assert_close(weights(engine), weights(plain), rtol=1e-5, atol=0)


def test_the_kernel_takes_the_loss_scale_out(passes: list[Any]) -> None:
    found = []
    for defers in (True, False):
        engine = engine_of(gradient_clipping=0.0, fp16={"enabled": True, "initial_scale_power": 8})
        if not defers:
            clips_at_once(engine)
        for step in range(3):
            backward(engine, step=step)
            engine.step()
        found.append(weights(engine))
    assert passes == [pytest.approx(2.0**-8)] * 3
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["SGD", "loop"])
def test_other_optimizers_are_given_clipped_gradients(optimizer: str, passes: list[Any]) -> None:
    engine = engine_of(optimizer)
    assert not takes_scaling(engine.optimizer)
    backward(engine)
    engine.step()
    assert len(passes) == 1


def test_who_looks_on_at_steps_sees_clipped_gradients(passes: list[Any]) -> None:
    engine = engine_of()
    norms = []

    def look(optimizer: Any, *_: Any) -> None:
        norms.append(math.hypot(*(float(p.grad.norm()) for g in optimizer.param_groups for p in g["params"])))

    engine.optimizer.register_step_pre_hook(look)
    backward(engine)
    engine.step()
    assert len(passes) == 1
    assert norms == [pytest.approx(CLIPPING, rel=1e-4)]


LOOKS: dict[str, Callable[[Any], Any]] = {
    "p.grad": lambda e: next(e.model.parameters()).grad,
    "full_gradient": lambda e: hf_dist.full_gradient(next(e.model.parameters())),
    "a norm of some": lambda e: e.window.norm_of({id(next(e.model.parameters()))}),
    "clip_grad_value": lambda e: e.clip_grad_value(1e9),
    "another backward": lambda e: backward(e, factor=0.0),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_gradients_after_a_clip_finds_them_clipped(look: str, passes: list[Any]) -> None:
    engine, plain = engine_of(), engine_of()
    clips_at_once(plain)
    for e in (engine, plain):
        e.set_gradient_accumulation_boundary(True)
        backward(e)
        e.clip_grad_norm(CLIPPING)
        LOOKS[look](e)
    assert len(passes) == 2
    for p, q in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0)
    assert float(engine.clip_grad_norm()) == pytest.approx(CLIPPING, rel=1e-3)
    for e in (engine, plain):
        e.apply_gradients()
    torch.testing.assert_close(weights(engine), weights(plain), rtol=1e-5, atol=0)


def test_two_clips_multiply(passes: list[Any]) -> None:
    engine, plain = engine_of(gradient_clipping=0.0), engine_of(gradient_clipping=0.0)
    clips_at_once(plain)
    for e in (engine, plain):
        backward(e)
        e.clip_grad_norm(CLIPPING)
        assert float(e.clip_grad_norm(CLIPPING / 2)) == pytest.approx(CLIPPING, rel=1e-3)
        e.step()
    assert len(passes) == 2, "those of the other engine"
    torch.testing.assert_close(weights(engine), weights(plain), rtol=1e-5, atol=0)


def test_what_was_put_off_ends_with_its_window(passes: list[Any]) -> None:
    engine, plain = engine_of(gradient_clipping=0.0), engine_of(gradient_clipping=0.0)
    backward(engine)
    engine.clip_grad_norm(CLIPPING)
    engine.zero_grad()
    for e in (engine, plain):
        backward(e, step=1)
        e.step()
    assert passes == []
    assert torch.equal(weights(engine), weights(plain))


def test_a_step_that_is_told_to_skip_changes_nothing() -> None:
    engine = engine_of()
    for step in range(2):
        backward(engine, step=step)
        engine.step()
    before = weights(engine), {k: v.clone() for s in engine.optimizer.state.values() for k, v in s.items()}
    backward(engine, float("nan"))
    engine.window.summary()
    engine.fragments.step(lambda f: True, StepScaling(torch.tensor(float("nan")), torch.tensor(1.0)))
    assert torch.equal(weights(engine), before[0])
    assert all(torch.equal(v, before[1][k]) for s in list(engine.optimizer.state.values())[-1:] for k, v in s.items())
    assert not hasattr(engine.optimizer, "found_inf") and not hasattr(engine.optimizer, "grad_scale")


def run(explode: int) -> dict[str, Any]:
    """Five steps in bf16, one of which is skipped."""
    engine = engine_of(bf16={"enabled": True})
    seen: dict[str, Any] = {"skipped": [], "rates": [], "moved": []}
    for step in range(5):
        before = weights(engine)
        backward(engine, float("inf") if step == explode else 1.0, step)
        engine.step()
        seen["skipped"].append(engine.step_was_skipped)
        seen["rates"].append(engine.get_lr()[0])
        seen["moved"].append(not torch.equal(weights(engine), before))
    seen["counts"] = (
        engine.skipped_steps,
        engine.global_steps,
        {int(s["step"]) for s in engine.optimizer.state.values()},
    )
    seen["plain"] = engine.plain_state()["counters"]
    return seen


@pytest.mark.parametrize("explode", [0, 2])
def test_a_skip_that_is_known_late_holds_the_schedule_back_one_step_later(
    explode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run(explode)
    monkeypatch.setattr(OptimizerStep, "_skips_on_device", lambda self, norm: True)
    late = run(explode)
    assert at_once["moved"] == late["moved"] == [step != explode for step in range(5)]
    assert at_once["counts"] == late["counts"] == (1, 5, {4})
    assert at_once["skipped"] == [step == explode for step in range(5)]
    assert late["skipped"] == [step == explode + 1 for step in range(5)]
    assert late["rates"][explode + 1 :] == at_once["rates"][explode + 1 :], (
        "one step later they are what they would have been"
    )
    assert late["plain"] == {"global_steps": 5, "skipped_steps": 1, "skip_not_told": False}


def test_a_skip_that_nobody_was_told_of_is_in_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.Tensor] = []

    def brought(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def get() -> torch.Tensor:
            waits.append(tensor)
            return tensor

        return get

    monkeypatch.setattr(skipped, "brought", brought)
    skips = SkippedSteps()
    skips.record_late(torch.tensor(0.0))
    assert waits == [], "nothing is asked in the step itself"
    skips.record_late(torch.tensor(1.0))
    assert len(waits) == 1 and not skips.last
    state = skips.state_dict()
    assert state == {"skipped_steps": 1, "skip_not_told": True}
    resumed = SkippedSteps()
    resumed.load_state_dict(state)
    assert (resumed.last, resumed.count) == (False, 1)
    resumed.record_late(torch.tensor(0.0))
    assert (resumed.last, resumed.count) == (True, 1)
    old = SkippedSteps()
    old.load_state_dict({"skipped_steps": 3})
    assert (old.last, old.count) == (False, 3)
