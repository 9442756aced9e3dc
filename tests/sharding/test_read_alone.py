"""Weights that no other rank holds a part of: a read outside of a pass works at stage 3, as in an ordinary process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import FreedParameterError
from tests.attempts import attempts
from tests.harness import run_ranks
from tests.sharding.loop import Loop, Scenario, adamw, assert_equal, on_one_process, run_all
from tests.sharding.models import Net, batch
from tests.sharding.test_edge import loss_of


def reads_and_writes(loop: Loop) -> None:
    """Between steps, with tensors that were taken before the weights changed."""
    weight, bias = loop.model.blocks[1].up.weight, loop.model.head.bias
    loop.extra["first"] = weight.norm()
    taken, row = weight.data, weight.detach()[3]
    for step in range(5):
        loop.backward(loss_of(loop, step))
        loop.step()
        loop.extra |= {
            f"{step} taken": taken.clone(),
            f"{step} row": row.clone(),
            f"{step} bias": bias.detach().clone(),
        }
        if step == 1:
            with torch.no_grad():
                weight.clamp_(-0.05, 0.05)
                bias.data = torch.full_like(bias, 0.25)
        if step == 2:
            loop.extra["state"] = torch.cat([v.reshape(-1) for v in loop.model.state_dict().values()])
        if step == 3:
            copied = copy.deepcopy(loop.model)
            loop.extra["copied"] = copied(batch(0)[0]).detach()


def outlive_the_model(loop: Loop) -> None:
    """A parameter and a state dict of a model that is trained and dropped."""
    other, loop.extra["seed"] = Net(), 1
    optimizer = adamw(other)
    engine = None
    if loop.engine:
        config = loop.engine.config
        engine = hf_dist.initialize(other, config=config, optimizer=optimizer, device="cpu")
    inner = Loop(other, optimizer, engine)
    for step in range(2):
        inner.backward(loss_of(inner, step))
        inner.step()
    kept, state = other.head.weight, other.state_dict()
    del inner, engine, optimizer, other
    loop.extra |= {"kept": kept.detach().clone(), "state": state["blocks.1.up.weight"] * 2}
    loop.backward(loss_of(loop, 0))
    loop.step()


def taken_over(loop: Loop) -> None:
    """Another engine has the model; the end of the first one must not touch the weights."""
    if loop.engine:
        first, config = loop.engine, loop.engine.config
        loop.optimizer = adamw(loop.model)
        loop.engine = hf_dist.initialize(loop.model, config=config, optimizer=loop.optimizer, device="cpu")
        del first
    for step in range(3):
        loop.extra[f"{step} head"] = loop.model.head.weight.detach().clone()
        loop.backward(loss_of(loop, step))
        loop.step()


def used_outside_of_their_modules(loop: Loop) -> None:
    """A loss with a weight of a block, and a block whose hooks do not run."""
    for step in range(4):
        x, y = loop.part(*batch(step))
        block = loop.model.blocks[0]
        hidden = block.forward(x) if step % 2 else nn.functional.linear(loop.model(x), block.up.weight)[:, : y.shape[1]]
        loop.backward(nn.functional.mse_loss(hidden, y) + 0.0 * loop.model(x).sum())
        loop.step()


def written_before_the_first_step(loop: Loop) -> None:
    """As an initialisation of one's own."""
    nn.init.constant_(loop.model.first.weight, 0.03)
    loop.model.load_state_dict({**loop.model.state_dict(), "head.bias": torch.full((24,), 0.5)})
    for step in range(3):
        loop.backward(loss_of(loop, step))
        loop.step()


ALONE = {"zero_optimization": {"mics_shard_size": 1}}
SCENARIOS = {
    f"{train.__name__}{name}": Scenario(Net, train, config=config, stages=(3,))
    for train in (
        reads_and_writes,
        outlive_the_model,
        taken_over,
        used_outside_of_their_modules,
        written_before_the_first_step,
    )
    for name, config in (("", {}), ("-replicas", ALONE))
}
CASES = {1: [(n, 3) for n in SCENARIOS if "-" not in n], 2: [(n, 3) for n in SCENARIOS if "-" in n]}


def offloaded(rank: int) -> str:
    """Weights that rest elsewhere stay refused: whole, they might not fit."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, **ALONE["zero_optimization"]}
    model = Net()
    hf_dist.initialize(model, config={"zero_optimization": zero}, optimizer=adamw(model), device="cpu")
    with pytest.raises(FreedParameterError) as caught:
        model.head.weight.norm()
    return str(caught.value)


def run(rank: int, world: int) -> tuple[list[Any], Any]:
    """Everything on this rank."""
    return run_all(rank, world, __name__, CASES[world]), attempts(rank, world, [lambda: offloaded(rank)])[0]


@functools.cache
def results(world: int) -> list[Any]:
    """By rank."""
    return run_ranks(run, world)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name, _ in cases])
def test_reads_and_writes_have_their_effect(world: int, name: str) -> None:
    expected = on_one_process(SCENARIOS[name])
    for cases, _ in results(world):
        assert_equal(cases[CASES[world].index((name, 3))], expected)


@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_rest_on_the_host_are_refused(world: int) -> None:
    for _, refused in results(world):
        assert refused.startswith("parameter head.weight was read while")
