"""Models and loops with awkward habits, at every ZeRO stage on two and three ranks, equal to one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.optim.lion import Lion
from tests.covering import FULL_GRID, chosen
from tests.harness import run_ranks
from tests.sharding import models
from tests.sharding.loop import Loop, Scenario, assert_equal, on_one_process, run_all
from tests.sharding.models import DIM, Net, batch


def loss_of(loop: Loop, step: int) -> torch.Tensor:
    """Mean squared error of this rank's rows."""
    x, y = loop.part(*batch(step))
    out = loop.model(x)
    return nn.functional.mse_loss(getattr(out, "hidden", out), y)


STEPS = 4 if FULL_GRID else 3
"""The third is the first that finds in order what a step after the first one has left."""


def plain(loop: Loop, steps: int = STEPS) -> None:
    """Nothing special about the loop."""
    for step in range(steps):
        loop.backward(loss_of(loop, step))
        loop.step()


# ---- loops


def towers(loop: Loop, first: str) -> None:
    """Rows that want the tower lie on the first rank, the last, all or none; `first` says which comes first."""
    rows = {"first": [0], "last": [11], "none": [], "all": list(range(12))}
    for step, which in enumerate([first, "last", "none", "first", "all", "first", "last"]):
        x, y = batch(step)
        x[rows[which], 0] = 9.0
        x, y = loop.part(x, y)
        loop.backward(nn.functional.mse_loss(loop.model(x), y))
        loop.step()


def two_forwards(loop: Loop) -> None:
    """As in DPO: two forwards and one without gradient between them, one backward."""
    for step in range(STEPS):
        one = loss_of(loop, step)
        with torch.no_grad():
            loop.extra[f"between {step}"] = mean_over_ranks(loop, loss_of(loop, step + 10))
        two = loss_of(loop, step + 20)
        loop.backward(one * 2 + two)
        loop.step()


def two_backwards(loop: Loop) -> None:
    """Two losses of their own forwards, each with a backward, one step."""
    for step in range(STEPS):
        loop.backward(loss_of(loop, step))
        loop.backward(loss_of(loop, step + 10))
        loop.step()


def two_backwards_of_one_forward(loop: Loop) -> None:
    """Two losses of the same forward; the first backward keeps the graph."""
    for step in range(STEPS):
        x, y = loop.part(*batch(step))
        out = loop.model(x)
        loop.backward(nn.functional.mse_loss(out, y), retain_graph=True)
        loop.backward(nn.functional.l1_loss(out, y))
        loop.step()


def evaluation_between(loop: Loop) -> None:
    """Forwards in evaluation between steps, and between a forward and its backward."""
    for step in range(STEPS):
        loss = loss_of(loop, step)
        for name, mode in (("no_grad", torch.no_grad), ("inference", torch.inference_mode)):
            with mode():
                loop.extra[f"{name} {step}"] = mean_over_ranks(loop, loss_of(loop, 10 + step))
        loop.backward(loss)
        loop.step()
        with torch.inference_mode():
            loop.extra[f"after {step}"] = mean_over_ranks(loop, loss_of(loop, 10 + step))
        loss_of(loop, 30)  # with gradient, and no backward for it


def step_without_backward(loop: Loop) -> None:
    """A forward whose loss nobody uses, then an optimizer step: nothing may change, not even by decay."""
    loss_of(loop, 0)
    loop.step()
    plain(loop, 2)
    loss_of(loop, 0)
    loop.step()
    plain(loop, 2)


def forward_only(loop: Loop) -> None:
    """A reference or reward model: no optimizer, with and without gradient mode."""
    for step in range(3):
        loop.extra[f"plain {step}"] = mean_over_ranks(loop, loss_of(loop, step))
        with torch.no_grad():
            loop.extra[f"no_grad {step}"] = mean_over_ranks(loop, loss_of(loop, step))


class Oops(Exception):
    """Raised on purpose."""


def broken_forward(loop: Loop) -> None:
    """A block raises in forward; the loop catches it and goes on."""
    for step in range(3):
        for where in (loop.model.blocks[1].up, loop.model.blocks[2], loop.model.head):
            handle = where.register_forward_pre_hook(_raise)
            with pytest.raises(Oops):
                loss_of(loop, step)
            handle.remove()
        loop.backward(loss_of(loop, step))
        loop.step()


def broken_backward(loop: Loop) -> None:
    """A backward raises half way; its gradients belong to no step."""
    for step in range(3):
        x, y = loop.part(*batch(step))
        hidden: list[torch.Tensor] = []
        handle = loop.model.blocks[1].register_forward_hook(lambda m, a, out, kept=hidden: kept.append(out))
        loss = nn.functional.mse_loss(loop.model(x), y)
        handle.remove()
        hidden[0].register_hook(_raise)
        with pytest.raises(Oops):
            loop.engine.backward(loss) if loop.engine else loss.backward()
        loop.drop()
        loop.backward(loss_of(loop, step))
        loop.step()


def _raise(*_: Any) -> None:
    raise Oops


def input_gradients(loop: Loop) -> None:
    """Inputs that require grad get theirs: adversarial training, soft prompts kept outside the model."""
    for step in range(3):
        x, y = loop.part(*batch(step))
        x = x.clone().requires_grad_()
        loop.backward(nn.functional.mse_loss(loop.model(x), y))
        assert x.grad is not None
        loop.extra[f"input {step}"] = sum_over_ranks(loop, x.grad.square().sum()) / loop.world**2
        loop.step()


def blocks_called_directly(loop: Loop) -> None:
    """The loop calls the parts of the model itself, never the model."""
    for step in range(STEPS):
        x, y = loop.part(*batch(step))
        h = loop.model.first(x)
        for block in loop.model.blocks:
            h = block(h)
        loop.backward(nn.functional.mse_loss(loop.model.head(h), y))
        loop.step()


def mean_over_ranks(loop: Loop, value: torch.Tensor) -> torch.Tensor:
    """Mean of a number over the data ranks."""
    return sum_over_ranks(loop, value) / loop.world


def sum_over_ranks(loop: Loop, value: torch.Tensor) -> torch.Tensor:
    """Sum of a number over the data ranks."""
    from hf_dist.dist import collectives

    if loop.engine is None:
        return value.detach().clone()
    return torch.stack(collectives.all_gather_object(loop.engine.mesh.dp, value.detach().clone())).sum(0)


# ---- models and optimizers


def frozen(make: Callable[[], nn.Module], trainable: Callable[[str], bool]) -> Callable[[], nn.Module]:
    """The model of `make` with only the parameters that `trainable` names."""

    def made() -> nn.Module:
        model = make()
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and trainable(name))
        return model

    return made


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two learning rates, two decays, and a group of one parameter."""
    named = dict(model.named_parameters())
    single = named.pop("head.bias")
    groups = [
        {"params": [p for n, p in named.items() if "up" in n], "lr": 3e-2, "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if "up" not in n]},
        {"params": single, "lr": 1e-1},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1)


def made_by(cls: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer over all trainable parameters."""
    return lambda model: cls([p for p in model.parameters() if p.requires_grad], **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": made_by(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": made_by(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, eps=1e-3),
    "rmsprop": made_by(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=False, eps=1e-2),
    "nadam": made_by(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "lion": made_by(Lion, lr=1e-4, weight_decay=0.1),
    "fused": made_by(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "groups": two_groups,
}


def bias_only(name: str) -> bool:
    """One bias of one block."""
    return name == "blocks.1.up.bias"


def late_blocks(name: str) -> bool:
    """The last block and the head: no gradient reaches the first blocks."""
    return name.startswith(("blocks.2", "head"))


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(Net, plain),
    "zero-sized-and-0d": Scenario(models.ScaledNet, plain),
    "0d-adagrad": Scenario(models.ScaledNet, plain, OPTIMIZERS["adagrad"]),
    "unused-everywhere": Scenario(models.UnusedNet, plain),
    "tower-on-one-rank": Scenario(models.TowerNet, functools.partial(towers, first="first")),
    "tower-late": Scenario(models.TowerNet, functools.partial(towers, first="none")),
    "tower-checkpointed": Scenario(models.TowerOutside, functools.partial(towers, first="first")),
    "tower-reentrant": Scenario(models.TowerOutsideReentrant, functools.partial(towers, first="first")),
    "mixed-dtypes-and-frozen": Scenario(models.MixedNet, plain),
    "one-bias": Scenario(frozen(Net, bias_only), plain),
    "frozen-forward-only": Scenario(frozen(Net, lambda name: False), forward_only, None),
    "frozen-first-blocks": Scenario(frozen(Net, late_blocks), plain),
    "frozen-base": Scenario(models.FrozenBaseNet, plain),
    "frozen-root": Scenario(frozen(Net, lambda n: n.startswith("blocks")), plain),
    "called-twice": Scenario(models.TwiceNet, plain),
    "called-twice-frozen": Scenario(frozen(models.TwiceNet, bias_only), plain),
    "passes-input-through": Scenario(models.PassingNet, plain),
    "input-ignored": Scenario(models.IgnoredNet, plain),
    "shared-between-containers": Scenario(models.SiblingPaths, plain),
    "dataclass-outputs": Scenario(models.DataclassNet, plain),
    "unknown-outputs": Scenario(models.HolderNet, plain),
    # At stage 3 torch refuses it: the block's inputs pass an autograd function that tells when backward is through.
    "in-place-inputs": Scenario(models.InPlaceNet, plain, stages=(0, 1, 2)),
    "own-embedding": Scenario(functools.partial(models.EmbeddingNet, False), plain),
    "own-embedding-tied": Scenario(functools.partial(models.EmbeddingNet, True), plain),
    "two-forwards": Scenario(Net, two_forwards),
    "two-forwards-frozen-base": Scenario(models.FrozenBaseNet, two_forwards),
    "two-backwards": Scenario(Net, two_backwards),
    "two-backwards-of-one-forward": Scenario(Net, two_backwards_of_one_forward),
    "two-backwards-frozen-base": Scenario(models.FrozenBaseNet, two_backwards_of_one_forward),
    "evaluation-between": Scenario(Net, evaluation_between),
    "step-without-backward": Scenario(Net, step_without_backward),
    "forward-raises": Scenario(Net, broken_forward),
    "backward-raises": Scenario(Net, broken_backward),
    "input-gradients": Scenario(Net, input_gradients),
    "parts-called-directly": Scenario(Net, blocks_called_directly),
    "checkpoint": Scenario(models.Outside, plain),
    "checkpoint-reentrant": Scenario(models.OutsideReentrant, plain),
    "checkpoint-frozen-base": Scenario(models.FrozenOutside, plain),
    "checkpoint-frozen-base-reentrant": Scenario(models.FrozenOutsideReentrant, plain),
    "checkpoint-two-forwards": Scenario(models.OutsideReentrant, two_forwards),
    "checkpoint-whole": Scenario(functools.partial(models.WholeCheckpointed, False), plain),
    "checkpoint-whole-reentrant": Scenario(functools.partial(models.WholeCheckpointed, True), plain),
    "tiny-buckets": Scenario(
        Net,
        plain,
        config={"zero_optimization": {"reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0, "allgather_bucket_size": 1}},
    ),
    "no-overlap": Scenario(Net, plain, config={"zero_optimization": {"overlap_comm": False}}),
    "hsdp": Scenario(models.TowerNet, functools.partial(towers, first="none"),
                     config={"zero_optimization": {"mics_shard_size": 2}}, stages=(3,), worlds=(4,)),
    **{f"optimizer-{name}": Scenario(Net, plain, make, stages=(3,), worlds=(2, 3)) for name, make in OPTIMIZERS.items()},
}  # fmt: skip

WORLDS = (2, 3, 4)
GRID = [(n, z, w) for n, s in SCENARIOS.items() for z in s.stages for w in s.worlds]


def settings(case: tuple[str, int, int]) -> dict[str, Any]:
    """Stages 0 to 2 run the same passes; three ranks cut shards elsewhere."""
    name, stage, world = case
    return {"passes of": (name, stage == 3), "stage and world": (stage, world)}


GATHERING = (
    "frozen-forward-only", "called-twice-frozen", "passes-input-through", "input-ignored", "shared-between-containers",
    "dataclass-outputs", "unknown-outputs", "own-embedding-tied", "two-forwards-frozen-base", "two-backwards-frozen-base",
    "input-gradients", "parts-called-directly", "checkpoint-frozen-base-reentrant", "checkpoint-whole-reentrant",
    "frozen-base", "frozen-root", "tower-reentrant", "forward-raises", "evaluation-between", "tiny-buckets",
    "checkpoint-two-forwards",
)  # fmt: skip
"""Their habits matter to what gathers and frees weights, or to shards: at stage 3."""
WHOLE = {
    "tower-checkpointed": 0, "in-place-inputs": 0, "two-backwards": 1, "step-without-backward": 1, "backward-raises": 2,
    "no-overlap": 2, "checkpoint-two-forwards": 1,
}  # fmt: skip
"""To what becomes of gradients: where weights are whole."""
UNEVEN = {"zero-sized-and-0d": 3, "mixed-dtypes-and-frozen": 3, "one-bias": 1, "tower-late": 3}
"""Shards that two ranks cut otherwise: on three."""
CHOSEN = chosen(GRID, settings, 1)
if not FULL_GRID:  # others are those with something less: without frozen weights, without reentrance, one forward
    CHOSEN = [*((name, 3, 2) for name in GATHERING), *((*case, 2) for case in WHOLE.items())]
    CHOSEN += [(*case, 3) for case in UNEVEN.items()]
CASES = {world: [(n, z) for n, z, w in CHOSEN if w == world] for world in WORLDS}


def run(rank: int, world: int) -> list[Any]:
    """All cases on this rank. A small embedding is a unit of its own here, as a large one is elsewhere."""
    from hf_dist.sharding import units

    units.OWN_UNIT_EMBEDDING_NUMEL = 37 * DIM
    return run_all(rank, world, __name__, CASES[world])


@functools.cache
def results(world: int) -> dict[tuple[str, int], list[Any]] | str:
    """Every rank's outcome by (scenario, stage); one spawn per number of ranks."""
    try:
        rows = run_ranks(run, world)
    except RuntimeError as error:
        return str(error)
    return {case: [row[i] for row in rows] for i, case in enumerate(CASES[world])}


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """The same in one process."""
    return on_one_process(SCENARIOS[name])


@pytest.mark.parametrize(
    ("world", "name", "stage"),
    [pytest.param(w, *case, id=f"{case[0]}-z{case[1]}-w{w}") for w, cases in CASES.items() for case in cases],
)
def test_equals_one_process(world: int, name: str, stage: int) -> None:
    outcome = results(world)
    assert not isinstance(outcome, str), outcome
    for got in outcome[name, stage]:
        assert_equal(got, expected(name))
