"""The engine's and the accelerator's calls in other orders than usual: several models, failures, announcements, scales."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist import DistAccelerator
from tests.covering import FULL_GRID, cells, chosen
from tests.harness import run_ranks
from tests.window.nets import Blocks, batch, config, loss_of, sgd, weights

RELATIVE = 1e-5
STAGES = range(4)
PASSES = STAGES if FULL_GRID else (1, 3)
"""Weights that are whole, and weights that are gathered."""
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


def same(found: torch.Tensor, wanted: torch.Tensor, relative: float = RELATIVE) -> None:
    """Equal weights."""
    torch.testing.assert_close(found, wanted, rtol=relative, atol=relative * float(wanted.abs().max()))


def prepared(settings: dict[str, Any], count: int) -> tuple[DistAccelerator, list[nn.Module], list[Any]]:
    """An accelerator with that many models and their optimizers."""
    accelerator = DistAccelerator(dist_config=settings)
    models = [Blocks(seed) for seed in range(count)]
    optimizers = [sgd(model) for model in models]
    ready = accelerator.prepare(*models, *optimizers)
    return accelerator, models, list(ready[count:])


def plain(count: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """The same without us."""
    models = [Blocks(seed) for seed in range(count)]
    return models, [sgd(model) for model in models]


# ------------------------------------------------------------------- several models


def each_backward_before_any_step(backward: Any, clip: Any, models: list[nn.Module], optimizers: list[Any]) -> None:
    for i in range(3):
        for k, model in enumerate(models):
            backward(loss_of(model, batch(10 * i + k)))
            clip(model.parameters(), 0.1 * (k + 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def clipped_together(backward: Any, clip: Any, models: list[nn.Module], optimizers: list[Any]) -> None:
    for i in range(3):
        backward(sum(loss_of(model, batch(10 * i + k)) for k, model in enumerate(models)))
        clip([p for model in models for p in model.parameters()], 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def parts_of_two_clipped_together(backward: Any, clip: Any, models: list[nn.Module], optimizers: list[Any]) -> None:
    for i in range(3):
        backward(sum(loss_of(model, batch(10 * i + k)) for k, model in enumerate(models)))
        clip([*models[0].head.parameters(), *models[1].blocks.parameters()], 0.05)
        clip(iter([models[0].first.weight]), 0.02)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def one_steps_more_often(backward: Any, clip: Any, models: list[nn.Module], optimizers: list[Any]) -> None:
    """As a generator beside its discriminator: gradients of the other's loss are dropped before its own."""
    for i in range(4):
        backward(loss_of(models[0], batch(i)) + loss_of(models[1], batch(i)))
        clip(models[0].parameters(), 0.3)
        optimizers[0].step()
        optimizers[0].zero_grad()
        if i % 2:
            clip(models[1].parameters(), 0.3)
            optimizers[1].step()
            optimizers[1].zero_grad()


def clipped_by_param_groups(backward: Any, clip: Any, models: list[nn.Module], optimizers: list[Any]) -> None:
    for i in range(3):
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(loss_of(model, batch(10 * i + k)))
            clip([p for group in optimizer.param_groups for p in group["params"]], 0.1)
            optimizer.step()
            optimizer.zero_grad()


ORDERS = [each_backward_before_any_step, clipped_together, parts_of_two_clipped_together, one_steps_more_often]
ORDERS += [clipped_by_param_groups]


def _norms(clip: Any, into: list[float]) -> Callable[[Any, float], None]:
    return lambda parameters, limit: into.append(float(clip(parameters, limit)))


def grid(name: str, values: Sequence[Any], **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value of an axis with either kind of passes, and every value of the others."""
    every = cells({name: values, "stage": STAGES, **axes}, 2 + len(axes))
    found = chosen(every, lambda cell: {**cell, name: (cell[name], cell["stage"] == 3)}, 1)
    rows = [(*cell.values(),) for cell in found]
    return pytest.mark.parametrize((*found[0],), rows, ids=lambda x: getattr(x, "__name__", None))


@grid("order", ORDERS, count=(2, 3))
def test_several_models_in_one_loop(order: Callable[..., None], stage: int, count: int) -> None:
    accelerator, models, optimizers = prepared(config(stage), count)
    found: list[float] = []
    wanted: list[float] = []
    order(accelerator.backward, _norms(accelerator.clip_grad_norm_, found), models, optimizers)
    others, torch_optimizers = plain(count)
    order(lambda loss: loss.backward(), _norms(torch.nn.utils.clip_grad_norm_, wanted), others, torch_optimizers)
    assert found == pytest.approx(wanted, rel=RELATIVE)
    for model, other in zip(models, others, strict=True):
        same(weights(model), weights(other))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_was_not_prepared_is_clipped_along(stage: int) -> None:
    accelerator, (model,), (optimizer,) = prepared(config(stage), 1)
    (other,), (torch_optimizer,) = plain(1)
    heads = [nn.Linear(8, 1), nn.Linear(8, 1)]
    heads[1].load_state_dict(heads[0].state_dict())
    norms = []
    for clip, head, body, step, backward in (
        (accelerator.clip_grad_norm_, heads[0], model, optimizer, accelerator.backward),
        (torch.nn.utils.clip_grad_norm_, heads[1], other, torch_optimizer, lambda loss: loss.backward()),
    ):
        backward(loss_of(body, batch(0)) + loss_of(head, batch(0)))
        norms.append(float(clip([*body.parameters(), *head.parameters()], 0.5)))
        step.step()
    assert norms[0] == pytest.approx(norms[1], rel=RELATIVE)
    same(weights(model), weights(other))
    torch.testing.assert_close(heads[0].weight.grad, heads[1].weight.grad)


@pytest.mark.parametrize("stage", PASSES)
def test_two_models_in_fp16_after_an_overflow_of_one(stage: int) -> None:
    accelerator, models, optimizers = prepared(config(stage, **FP16), 2)
    norms = []
    for i in range(3):
        x = torch.full((4, 8), float("inf")) if i == 0 else batch(i)
        accelerator.backward(loss_of(models[0], x) / 100 + loss_of(models[1], batch(i)) / 100)
        norms.append([float(accelerator.clip_grad_norm_(m.parameters(), 1e9)) for m in models][1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (_, other), (_, optimizer) = plain(2)
    wanted = []
    for i in range(3):
        (loss_of(other, batch(i)) / 100).backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx(wanted, rel=5e-3)
    same(weights(models[1]), weights(other), 5e-3)
    assert accelerator.engines[0].loss_scale == accelerator.engines[1].loss_scale == 128


def test_a_window_of_one_model_outlives_a_change_of_the_scale_by_another() -> None:
    accelerator, models, optimizers = prepared(config(1, **FP16), 2)
    accelerator.backward(loss_of(models[1], batch(1)) / 100)
    accelerator.backward(loss_of(models[0], torch.full((4, 8), float("inf"))))
    optimizers[0].step()
    optimizers[0].zero_grad()
    assert accelerator.engines[1].loss_scale == 128
    accelerator.backward(loss_of(models[1], batch(2)) / 100)
    norm = float(accelerator.clip_grad_norm_(models[1].parameters(), 0.01))
    optimizers[1].step()
    (_, other), (_, optimizer) = plain(2)
    (loss_of(other, batch(1)) / 100).backward()
    (loss_of(other, batch(2)) / 100).backward()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)), rel=5e-3)
    optimizer.step()
    same(weights(models[1]), weights(other), 5e-3)


@pytest.mark.parametrize("stage", PASSES)
def test_engines_made_apart_take_one_loss_between_them(stage: int) -> None:
    """`hf_dist.initialize` twice, one backward: each learns the scale from the backward itself."""
    models = [Blocks(seed) for seed in range(2)]
    engines = [hf_dist.initialize(m, config=config(stage, **FP16), optimizer=sgd(m)) for m in models]
    engines[1].scaler.scale = 2.0  # type: ignore[union-attr]
    engines[0].backward((loss_of(models[0], batch(0)) + loss_of(models[1], batch(1))) / 100)
    for engine in engines:
        engine.step()
    others, optimizers = plain(2)
    ((loss_of(others[0], batch(0)) + loss_of(others[1], batch(1))) / 100).backward()
    for k in range(2):
        optimizers[k].step()
        same(weights(models[k]), weights(others[k]), 5e-3)


# ------------------------------------------------------------------------ failures


def _engine(stage: int, accumulation: int = 2, **more: Any) -> hf_dist.Engine:
    model = Blocks()
    return hf_dist.initialize(model, config=config(stage, accumulation, **more), optimizer=sgd(model))


def _window(first: int) -> Any:
    return iter([{"x": batch(first)}, {"x": batch(first + 1)}])


def _loss(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
    return loss_of(model, microbatch["x"])


def fails_before_the_forward(error: type[BaseException]) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
        raise error

    return loss


def fails_in_the_forward(error: type[BaseException]) -> Callable[..., torch.Tensor]:
    def hook(*args: Any) -> None:
        raise error

    def loss(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
        handle = model.blocks[1].register_forward_pre_hook(hook)  # type: ignore[index, union-attr]
        try:
            return _loss(model, microbatch)
        finally:
            handle.remove()

    return loss


def fails_after_the_forward(error: type[BaseException]) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
        _loss(model, microbatch)
        raise error

    return loss


def fails_in_the_backward(error: type[BaseException]) -> Callable[..., torch.Tensor]:
    def through_the_model(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = model.blocks[1].register_forward_hook(lambda m, a, o: kept.append(o))  # type: ignore[index, union-attr]
        value = _loss(model, microbatch)
        handle.remove()
        kept[0].register_hook(_raise(error))
        return value

    return through_the_model


def _raise(error: type[BaseException]) -> Callable[[torch.Tensor], None]:
    def hook(grad: torch.Tensor) -> None:
        raise error

    return hook


FAILURES = [fails_before_the_forward, fails_in_the_forward, fails_after_the_forward, fails_in_the_backward]


@grid("failure", FAILURES, at=(0, 1), error=(RuntimeError, KeyboardInterrupt))
def test_a_train_batch_that_fails_leaves_nothing_behind(
    failure: Callable[..., Any], stage: int, at: int, error: type[BaseException]
) -> None:
    engine, count = _engine(stage), 0

    def loss(model: nn.Module, microbatch: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        return (failure(error) if count == at + 1 else _loss)(model, microbatch)

    engine.train_batch(_window(50), _loss)
    with pytest.raises(error):
        engine.train_batch(_window(60), loss)
    engine.train_batch(_window(70), _loss)
    for x in (80, 81, 82, 83):
        engine.backward(loss_of(engine.model, batch(x)))
        engine.step()
    clean = _engine(stage)
    for first in (50, 70, 80, 82):
        clean.train_batch(_window(first), _loss)
    assert engine.global_steps == clean.global_steps == 4
    assert engine.get_global_grad_norm() == pytest.approx(clean.get_global_grad_norm())
    same(weights(engine.model), weights(clean.model))


@pytest.mark.parametrize("stage", PASSES)
def test_a_backward_that_fails_takes_its_window_with_it(stage: int) -> None:
    engine = _engine(stage)
    engine.backward(loss_of(engine.model, batch(1)))
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.backward(fails_in_the_backward(ZeroDivisionError)(engine.model, {"x": batch(2)}))
    assert engine.micro_steps == 0
    for x in (3, 4):
        engine.backward(loss_of(engine.model, batch(x)))
        engine.step()
    clean = _engine(stage)
    clean.train_batch(_window(3), _loss)
    assert engine.global_steps == 1
    same(weights(engine.model), weights(clean.model))


# ------------------------------------------------------- announcements and clipping


@grid("announced", (True, False, None))
def test_what_is_announced_moves_no_number(stage: int, announced: bool | None) -> None:
    """A window whose last microbatch was announced as another one, or each as the last."""
    engine = _engine(stage)
    for first in (10, 20):
        for i in range(2):
            engine.set_gradient_accumulation_boundary(announced)
            engine.backward(loss_of(engine.model, batch(first + i)))
            engine.set_gradient_accumulation_boundary(i == 1)
            engine.step()
    clean = _engine(stage)
    for first in (10, 20):
        clean.train_batch(_window(first), _loss)
    assert engine.global_steps == 2
    same(weights(engine.model), weights(clean.model))


@pytest.mark.parametrize("stage", PASSES)
def test_every_backward_inside_no_sync_and_then_a_step(stage: int) -> None:
    accelerator, (model,), (optimizer,) = prepared(config(stage), 1)
    with accelerator.no_sync(model):
        for x in (1, 2):
            accelerator.backward(loss_of(model, batch(x)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    (other,), (torch_optimizer,) = plain(1)
    for x in (1, 2):
        loss_of(other, batch(x)).backward()
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)), rel=RELATIVE)
    torch_optimizer.step()
    same(weights(model), weights(other))


def test_no_clipping_unless_somebody_asks() -> None:
    engine = _engine(1, 1)
    before = weights(engine.model)
    engine.backward(100 * loss_of(engine.model, batch(0)))
    engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None and norm > 100
    assert float((weights(engine.model) - before).norm()) == pytest.approx(0.01 * norm, rel=1e-4)


@pytest.mark.parametrize(("first", "configured", "smallest"), [(0.5, 1.0, 0.5), (2.0, 1.0, 1.0), (0.5, 0.0, 0.5)])
def test_a_step_does_not_undo_an_earlier_clip(first: float, configured: float, smallest: float) -> None:
    engine = _engine(1, 1, gradient_clipping=configured)
    before = weights(engine.model)
    engine.backward(100 * loss_of(engine.model, batch(0)))
    norm = float(engine.clip_grad_norm(first))
    engine.step()
    assert norm > 100 and engine.get_global_grad_norm() == pytest.approx(norm)
    assert float((weights(engine.model) - before).norm()) == pytest.approx(0.01 * smallest, rel=1e-4)


@pytest.mark.parametrize("stage", PASSES)
def test_a_clip_belongs_to_the_gradients_it_was_asked_for(stage: int) -> None:
    """Also in fp16, where clipped gradients hold no loss scale any more and later ones do."""
    for more, relative in (({}, RELATIVE), (FP16, 5e-3)):
        engine = _engine(stage, 1, **more)
        engine.backward(loss_of(engine.model, batch(0)) / 100)
        engine.clip_grad_norm(0.01)
        engine.backward(loss_of(engine.model, batch(1)) / 100)
        engine.step()
        (other,), (optimizer,) = plain(1)
        (loss_of(other, batch(0)) / 100).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        (loss_of(other, batch(1)) / 100).backward()
        optimizer.step()
        same(weights(engine.model), weights(other), relative)


@pytest.mark.parametrize("stage", PASSES)
def test_a_kept_graph_goes_backward_twice(stage: int) -> None:
    engine = _engine(stage, 1)
    loss = loss_of(engine.model, batch(0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    (other,), (optimizer,) = plain(1)
    (2 * loss_of(other, batch(0))).backward()
    optimizer.step()
    same(weights(engine.model), weights(other))


def test_zero_grad_begins_the_window_again() -> None:
    engine = _engine(1, 3)
    for x in (1, 2):
        engine.backward(100 * loss_of(engine.model, batch(x)))
        engine.step()
    engine.zero_grad()
    for x in (3, 4, 5):
        engine.backward(loss_of(engine.model, batch(x)))
        engine.step()
    clean = _engine(1, 3)
    clean.train_batch(iter([{"x": batch(x)} for x in (3, 4, 5)]), _loss)
    assert engine.global_steps == 1
    same(weights(engine.model), weights(clean.model))


def test_nothing_keeps_an_engine_alive_that_nobody_holds() -> None:
    """Without the cyclic collector: its memory would wait for it."""
    import gc

    gc.collect()
    gc.disable()
    try:
        engine = _engine(1, 1)
        with contextlib.suppress(RuntimeError):
            engine.train_batch(_window(0), fails_in_the_forward(RuntimeError))
        engine.train_batch(_window(0), _loss)
        held = weakref.ref(engine.sharded.groups[0])
        del engine
        assert held() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------ two ranks


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    """Orders of calls where every rank has its own rows; the weights at their end."""
    rows = lambda i: batch(i, 4 * world)[4 * rank : 4 * rank + 4]  # noqa: E731
    found: dict[str, Any] = {}
    for stage in STAGES:
        for sizes in ((), (1,)) if stage == 3 else ((),):  # of shard groups
            settings = config(stage)
            if sizes:
                settings["zero_optimization"]["mics_shard_size"] = 1
            accelerator, models, optimizers = prepared(settings, 2)
            norms = []
            for i in range(2):
                with accelerator.no_sync(models[0]):
                    accelerator.backward(sum(loss_of(m, rows(3 * i)) for m in models))
                accelerator.backward(loss_of(models[0], rows(3 * i + 1)))
                norms.append(float(accelerator.clip_grad_norm_(models[0].parameters(), 0.2)))
                both = [*models[0].head.parameters(), *models[1].parameters()]
                norms.append(float(accelerator.clip_grad_norm_(both, 0.1)))
                groups = [p for group in optimizers[1].param_groups for p in group["params"]]
                norms.append(float(accelerator.clip_grad_norm_(groups, 0.05)))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"orders-{stage}-{sizes}"] = ([weights(m) for m in models], norms)
        engine = _engine(stage)
        for first, error in ((10, None), (20, RuntimeError), (30, KeyboardInterrupt), (40, None)):
            microbatches = iter([{"x": rows(first)}, {"x": rows(first + 1)}])
            at = fails_in_the_backward if error is RuntimeError else fails_in_the_forward
            with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                engine.train_batch(microbatches, _loss if error is None else at(error))
        found[f"failures-{stage}"] = weights(engine.model)
    return found


def test_two_ranks_in_unusual_orders() -> None:
    others, optimizers = plain(2)
    norms = []
    for i in range(2):
        sum(loss_of(m, batch(3 * i, 8)) for m in others).backward()  # type: ignore[union-attr]
        loss_of(others[0], batch(3 * i + 1, 8)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(others[0].parameters(), 0.2)))
        both = [*others[0].head.parameters(), *others[1].parameters()]  # type: ignore[union-attr]
        norms.append(float(torch.nn.utils.clip_grad_norm_(both, 0.1)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(others[1].parameters(), 0.05)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    clean = _engine(0)
    for first in (10, 40):
        clean.train_batch(iter([{"x": batch(first, 8)}, {"x": batch(first + 1, 8)}]), _loss)
    for found in run_ranks(on_ranks, 2):
        for name, value in found.items():
            if name.startswith("failures"):
                same(value, weights(clean.model))
                continue
            assert value[1] == pytest.approx(norms, rel=RELATIVE), name
            for k in range(2):
                same(value[0][k], weights(others[k]))
