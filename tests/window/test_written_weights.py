"""Weights that user code reads and writes in any order, between any calls, are those of plain torch, at every stage."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import hf_dist
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.window.nets import Blocks, batch, config, loss_of

RATE = 0.002
"""Small: in half precision, rounded gradients of each rank shall move no weight by more than its rounding."""
LAYOUTS = [(stage, half) for stage in range(4) for half in (False, True)]


class Torch:
    """Plain torch; in half precision with fp32 masters, which take the elements that user code has changed."""

    def __init__(self, half: bool) -> None:
        self.model: nn.Module = Blocks()
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.half = half
        if half:
            self.model.bfloat16()
        self.params = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.params, lr=RATE)

    def for_writes(self) -> AbstractContextManager[None]:
        """Where weights may be written."""
        return nullcontext()

    def forward(self, i: int) -> torch.Tensor:
        x = batch(i, 4)
        return loss_of(self.model, x.bfloat16() if self.half else x)

    @torch.no_grad()
    def step(self) -> None:
        if not self.half:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        for p, master in zip(self.params, self.masters, strict=True):
            torch.where(p == master.to(p.dtype), master, p.float(), out=master)
            if p.grad is not None:
                master.sub_(p.grad.float(), alpha=RATE)
                p.copy_(master)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def write_groups(self, pick: int) -> None:
        """Scale what the optimizer steps."""
        self.masters[pick].mul_(0.75)
        if self.half:
            self.params[pick].copy_(self.masters[pick])
        else:
            self.params[pick].mul_(0.75)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.params])


class Prepared(Torch):
    """A prepared model, with the same calls."""

    def __init__(self, half: bool, stage: int, rows: slice = slice(None)) -> None:
        self.model, self.stage, self.rows = Blocks(), stage, rows
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=RATE)
        more = {"bf16": {"enabled": True}} if half else {}
        self.engine = hf_dist.initialize(self.model, config=config(stage, **more), optimizer=self.optimizer)

    def for_writes(self) -> AbstractContextManager[None]:
        return hf_dist.gathered(self.model, modifier_rank=0) if self.stage == 3 else nullcontext()

    def forward(self, i: int) -> torch.Tensor:
        return loss_of(self.engine, batch(i, 4)[self.rows])

    def step(self) -> None:
        self.engine.step()

    @torch.no_grad()
    def write_groups(self, pick: int) -> None:
        for group in self.optimizer.param_groups:
            group["params"][pick].mul_(0.75)

    def weights(self) -> torch.Tensor:
        with hf_dist.gathered(self.model):
            return super().weights().clone()


class Script:
    """What a user does, one call after the other; `pick` chooses among the parameters."""

    def __init__(self, kit: Torch) -> None:
        self.kit = kit
        self.held: dict[int, torch.Tensor] = {}
        self.seen: list[float] = []
        self.batches = 0

    def train(self, pick: int) -> None:
        self.kit.forward(self.batches).backward()
        self.batches += 1
        self.kit.step()

    def evaluate(self, pick: int) -> None:
        with torch.no_grad():
            self.seen.append(float(self.kit.forward(0)))

    def read(self, pick: int) -> None:
        with self.kit.for_writes():
            self.seen.append(float(self.kit.params[pick].detach().float().sum()))

    def read_groups(self, pick: int) -> None:
        for group in self.kit.optimizer.param_groups:
            sum(float(p.sum()) for p in group["params"])

    def write_groups(self, pick: int) -> None:
        """As SAM climbs and returns, after a backward; the model sees it from its next forward on."""
        self.train(pick)
        self.kit.write_groups(pick)
        self.evaluate(pick)

    def hold(self, pick: int) -> None:
        with self.kit.for_writes():
            self.held[pick] = self.kit.params[pick].data

    def write_held(self, pick: int) -> None:
        with self.kit.for_writes():
            for tensor in self.held.values():
                tensor.mul_(0.5)

    def write(self, pick: int) -> None:
        with self.kit.for_writes(), torch.no_grad():
            self.kit.params[pick].mul_(0.75)

    def write_data(self, pick: int) -> None:
        with self.kit.for_writes():
            self.kit.params[pick].data.mul_(1.25)

    def write_rows(self, pick: int) -> None:
        with self.kit.for_writes():
            self.kit.params[pick].data[:1].zero_()

    def assign(self, pick: int) -> None:
        with self.kit.for_writes():
            self.kit.params[pick].data = self.kit.params[pick].detach().clone() * 0.5

    def give_back(self, pick: int) -> None:
        """What was read before other elements were assigned, as an average of the weights is swapped in and out."""
        if (held := self.held.pop(pick, None)) is not None:
            with self.kit.for_writes():
                self.kit.params[pick].data = held

    def copy(self, pick: int) -> None:
        with self.kit.for_writes(), torch.no_grad():
            self.kit.params[pick].copy_(torch.full(tuple(self.kit.params[pick].shape), 0.25))

    def save(self, pick: int) -> None:
        self.seen.append(float(self.kit.weights().sum()))


CALLS = [name for name in vars(Script) if not name.startswith("_")] + 3 * ["train"]
Calls = list[tuple[str, int]]


def done(calls: Calls, make: Callable[[], Torch]) -> tuple[torch.Tensor, list[float]]:
    """Weights after the calls, and what was seen on the way."""
    script = Script(make())
    for name, pick in [*calls, ("train", 0)]:
        getattr(script, name)(pick)
    return script.kit.weights(), script.seen


def close(found: tuple[torch.Tensor, list[float]], wanted: tuple[torch.Tensor, list[float]], half: bool) -> None:
    """Equal; in half precision up to one rounding of each element."""
    relative = 2.0**-7 if half else 1e-5
    torch.testing.assert_close(found[0], wanted[0], rtol=relative, atol=relative * float(wanted[0].abs().max()))
    assert found[1] == pytest.approx(wanted[1], rel=4 * relative, abs=4 * relative)


@settings(max_examples=60 if FULL_GRID else 24, deadline=None)  # drawn anew in every run
@example([("train", 0), ("assign", 0), ("copy", 0), ("save", 0)], (0, False))
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 9)), max_size=12), st.sampled_from(LAYOUTS))
def test_any_order_of_reads_and_writes_is_that_of_torch(calls: Calls, layout: tuple[int, bool]) -> None:
    stage, half = layout
    close(done(calls, lambda: Prepared(half, stage)), done(calls, lambda: Torch(half)), half)


def drawn(seed: int) -> Calls:
    """Twelve calls, the same on every rank."""
    draw = random.Random(seed)
    return [(draw.choice(CALLS), draw.randrange(10)) for _ in range(12)]


def on_ranks(rank: int, world: int) -> list[tuple[torch.Tensor, list[float]]]:
    """Every layout with two orders of calls; each rank has half of the rows."""
    rows = slice(2 * rank, 2 * rank + 2)
    return [
        done(drawn(2 * i + j), lambda layout=layout: Prepared(layout[1], layout[0], rows))  # type: ignore[misc]
        for i, layout in enumerate(LAYOUTS)
        for j in range(2)
    ]


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    """What each rank found."""
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("case", range(2 * len(LAYOUTS)))
def test_two_ranks_are_torch_on_the_joined_batch(case: int, two_ranks: list[Any]) -> None:
    _, half = LAYOUTS[case // 2]
    wanted = done(drawn(case), lambda: Torch(half))
    for found in two_ranks:
        torch.testing.assert_close(found[case][0], two_ranks[0][case][0], rtol=0, atol=0)
    close((two_ranks[0][case][0], []), (wanted[0], []), half)
