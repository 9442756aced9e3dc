"""One training loop, written once, that runs in one process with plain torch and on ranks through an engine.

A `Scenario` makes a model and drives a `Loop`; `on_one_process` and `on_rank` give what both must agree on: losses, gradient
norms, every weight, and whatever the scenario put into `extra`.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.dist.patience import crowding
from tests.attempts import attempts

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
TOLERANCE = 1e-5


def timeout() -> timedelta:
    """Of each collective: ranks that disagree about what comes next fail here, and the cases after them still run."""
    return timedelta(seconds=10 * crowding())


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """`eps` is large so that a gradient which is zero but for rounding does not become a full step."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.1)


class Loop:
    """What a scenario drives: `part` a batch, `backward` a loss, `step`."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None, engine: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = engine
        self.rank, self.world = (engine.mesh.dp.rank, engine.mesh.dp.size) if engine else (0, 1)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.extra: dict[str, Any] = {}

    def part(self, *tensors: torch.Tensor) -> Any:
        """This rank's rows; all of them in one process."""
        parts = tuple(t.chunk(self.world)[self.rank] for t in tensors)
        return parts if len(parts) > 1 else parts[0]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """`loss`: mean over this rank's rows."""
        self.losses.append(float(loss.detach()))
        if self.engine:
            self.engine.backward(loss, retain_graph=retain_graph)
        else:
            loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        """Optimizer step; the gradients are gone after it."""
        if self.engine:
            self.engine.step()
            self.norms.append(self.engine.get_global_grad_norm())
            return
        assert self.optimizer is not None
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop(self) -> None:
        """Forget the gradients."""
        if self.engine:
            self.engine.zero_grad()
        else:
            self.model.zero_grad()


@dataclass(frozen=True)
class Scenario:
    """A model and what is done with it."""

    make: Callable[[], nn.Module]
    train: Callable[[Loop], None]
    optimizer: MakeOptimizer | None = adamw
    config: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    worlds: tuple[int, ...] = (2, 3)


def on_one_process(scenario: Scenario) -> dict[str, Any]:
    """Plain torch, the joined batch, fp32."""
    model = scenario.make().float()
    loop = Loop(model, scenario.optimizer(model) if scenario.optimizer else None)
    scenario.train(loop)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": loop.losses, "norms": loop.norms, "extra": loop.extra, "weights": weights}


def on_rank(scenario: Scenario, stage: int) -> dict[str, Any]:
    """The same through `hf_dist.initialize`; losses are the mean over the ranks."""
    import hf_dist
    from hf_dist.dist import collectives

    model = scenario.make()
    optimizer = scenario.optimizer(model) if scenario.optimizer else None
    zero = {"stage": stage, **scenario.config.get("zero_optimization", {})}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **scenario.config, "zero_optimization": zero}
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu", timeout=timeout())
    loop = Loop(model, optimizer, engine)
    scenario.train(loop)
    everyone = collectives.all_gather_object(engine.mesh.dp, loop.losses)
    losses = [sum(row) / len(row) for row in zip(*everyone, strict=True)]
    with hf_dist.gathered(model):
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    leftover = [n for n, p in model.named_parameters() if p.grad is not None]
    assert not leftover, f"gradients left on {leftover}"
    return {"losses": losses, "norms": loop.norms, "extra": loop.extra, "weights": weights}


def run_all(rank: int, world: int, module: str, names: list[tuple[str, int]]) -> list[Any]:
    """Every (scenario, stage) of `module.SCENARIOS` on this rank; one that raises gives its traceback."""
    import importlib

    scenarios = importlib.import_module(module).SCENARIOS
    jobs = (functools.partial(on_rank, scenarios[name], stage) for name, stage in names)
    return attempts(rank, world, jobs)


def attempt(run: Callable[[], Any]) -> Any:
    """What `run()` returned, or its traceback. Not for what ranks do together: `attempts`."""
    try:
        return run()
    except (Exception, pytest.fail.Exception):  # `pytest.raises` that saw nothing fails with the latter
        return traceback.format_exc()


def assert_equal(got: Any, expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Losses, norms, extras and weights agree to `tolerance`, relative."""
    assert not isinstance(got, str), got
    for key in ("losses", "norms"):
        assert len(got[key]) == len(expected[key])
        for a, b in zip(got[key], expected[key], strict=True):
            assert abs(a - b) <= tolerance * max(abs(b), 1e-6), (key, got[key], expected[key])
    assert got["weights"].keys() == expected["weights"].keys()
    for part in ("extra", "weights"):
        for name, value in expected[part].items():
            assert difference(got[part][name], value) <= tolerance, name


def difference(a: Any, b: Any) -> float:
    """Norm of the difference relative to the norm of `b`; 0 or 1 for what is not a tensor."""
    if not isinstance(b, torch.Tensor):
        return float(a != b)
    if a.shape != b.shape:
        return 1.0
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))
