"""`gathered()` on two ranks at every ZeRO stage: values, changes, nesting, inside a forward."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import FreedParameterError, ModelError
from tests.attempts import attempts_by_name
from tests.harness import run_ranks
from tests.sharding.loop import adamw
from tests.sharding.models import MixedNet, Net, batch

STAGES = (0, 1, 2, 3)


class Case:
    """A sharded model, and what its weights were before."""

    def __init__(self, rank: int, stage: int, dtype: str = "fp32", make: Callable[[], nn.Module] = Net) -> None:
        self.rank, self.stage = rank, stage
        self.model: Any = make()
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bf16"},
        }
        optimizer = adamw(self.model)
        self.engine = hf_dist.initialize(self.model, config=config, optimizer=optimizer, device="cpu")

    def weights(self) -> dict[str, torch.Tensor]:
        """All full weights now. Collective."""
        with hf_dist.gathered(self.model):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def masters(self) -> dict[str, torch.Tensor]:
        """All full master weights. Collective."""
        from hf_dist.sharding.full_params import full_tensors

        groups = self.engine.sharded.groups
        return {slot.name: full.float() for g in groups for slot, full in full_tensors(g)}

    def loss(self) -> torch.Tensor:
        """The same rows on every rank."""
        x, y = batch(0)
        dtype = next(self.model.parameters()).dtype
        return nn.functional.mse_loss(self.engine(x).to(y.dtype), y.to(dtype).to(y.dtype))

    def step(self) -> None:
        """One training step."""
        self.engine.backward(self.loss())
        self.engine.step()

    def is_freed(self, p: nn.Parameter) -> bool:
        """Whether reading `p` raises."""
        try:
            p.norm()
        except FreedParameterError:
            return True
        return False


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Every tensor bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n].to(a[n].dtype)) for n in a)


def values(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    assert equal(case.weights(), case.before)
    mixed = Case(rank, stage, make=MixedNet)
    assert equal(mixed.weights(), mixed.before)
    assert case.is_freed(case.model.head.weight) == (stage == 3)


def changes_of_one_rank(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    for source in (1, 0):
        with torch.no_grad(), hf_dist.gathered(case.model, modifier_rank=source):
            case.model.blocks[1].up.weight.fill_(rank + 5.0)
            case.model.head.bias[3] = rank + 7.0
        expected = {**case.before, "blocks.1.up.weight": torch.full((48, 24), source + 5.0)}
        expected["head.bias"] = case.before["head.bias"].clone()
        expected["head.bias"][3] = source + 7.0
        assert equal(case.weights(), expected)
        assert equal(case.masters(), expected)
    other = Case(rank, stage, make=functools.partial(changed_net, expected))
    for each in (case, other):
        each.step()
    assert equal(case.weights(), other.weights())


def changed_net(weights: dict[str, torch.Tensor]) -> nn.Module:
    """The model with these weights from the start."""
    model = Net()
    model.load_state_dict(weights)
    return model


def masters_keep_their_bits(rank: int, stage: int) -> None:
    case = Case(rank, stage, "bf16")
    assert equal(case.masters(), case.before)
    with torch.no_grad(), hf_dist.gathered(case.model, modifier_rank=0):
        case.model.blocks[1].up.bias.zero_()
    expected = {**case.before, "blocks.1.up.bias": torch.zeros(48)}
    assert equal(case.masters(), expected)


def frozen_weights_change_too(rank: int, stage: int) -> None:
    case = Case(rank, stage, make=frozen_but_head)
    with torch.no_grad(), hf_dist.gathered(case.model.blocks[0], modifier_rank=1):
        case.model.blocks[0].up.weight.fill_(rank)
    assert bool((case.weights()["blocks.0.up.weight"] == 1).all())


def frozen_but_head() -> nn.Module:
    """Only the head is trained."""
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def nested(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    p, q = case.model.head.weight, case.model.blocks[0].up.weight
    with hf_dist.gathered(case.model):
        with hf_dist.gathered(p), hf_dist.gathered([q, p]):
            assert torch.equal(q, case.before["blocks.0.up.weight"])
        assert torch.equal(p, case.before["head.weight"]) and torch.equal(q, case.before["blocks.0.up.weight"])
    assert case.is_freed(p) == case.is_freed(q) == (stage == 3)


def single_parameter(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    p = case.model.blocks[2].down.weight
    with hf_dist.gathered(p):
        assert torch.equal(p, case.before["blocks.2.down.weight"])
        assert case.is_freed(case.model.blocks[1].down.weight) == (stage == 3)
    with hf_dist.gathered(p for p in case.model.blocks.parameters()):
        assert torch.equal(p, case.before["blocks.2.down.weight"])
    with hf_dist.gathered([]):
        pass


def inside_a_forward(rank: int, stage: int) -> None:
    case, plain = Case(rank, stage), Case(rank, stage)
    seen: list[bool] = []

    def look(module: nn.Module, args: Any) -> None:
        with hf_dist.gathered(case.model):
            seen.append(torch.equal(case.model.blocks[2].up.weight, case.before["blocks.2.up.weight"]))

    handle = case.model.blocks[1].up.register_forward_pre_hook(look)
    loss = case.loss()
    handle.remove()
    assert seen == [True]
    assert torch.equal(loss, plain.loss())
    case.engine.backward(loss)
    case.engine.step()
    plain.step()
    assert equal(case.weights(), plain.weights())


def forward_inside(rank: int, stage: int) -> None:
    case, plain = Case(rank, stage), Case(rank, stage)
    with hf_dist.gathered(case.model):
        loss = case.loss()
        with torch.no_grad():
            case.loss()
        assert torch.equal(case.model.blocks[0].up.weight, case.before["blocks.0.up.weight"])
        case.engine.backward(loss)
        assert torch.equal(case.model.blocks[0].up.weight, case.before["blocks.0.up.weight"])
    case.engine.step()
    plain.step()
    assert equal(case.weights(), plain.weights())


def after_a_step(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    case.step()
    weights = case.weights()
    assert not torch.equal(weights["head.weight"], case.before["head.weight"])
    assert equal(weights, case.masters())


def step_inside_is_refused(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    case.engine.backward(case.loss())
    with pytest.raises(ModelError, match="gathered"), hf_dist.gathered(case.model):
        case.engine.step()


def an_error_inside_frees(rank: int, stage: int) -> None:
    case = Case(rank, stage)
    with pytest.raises(KeyError), hf_dist.gathered(case.model):
        raise KeyError
    assert case.is_freed(case.model.head.weight) == (stage == 3)


def foreign_parameters_are_refused(rank: int, stage: int) -> None:
    with pytest.raises(ModelError, match="does not belong"), hf_dist.gathered(Net()):
        pass


def changes_without_a_rank_are_warned_about(rank: int, stage: int) -> None:
    from hf_dist import log

    case = Case(rank, stage)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    log._said.clear()
    with hf_dist.gathered(case.model):
        pass
    assert not said
    with torch.no_grad(), hf_dist.gathered(case.model):
        case.model.head.bias.zero_()
    log.logger.removeHandler(handler)
    assert any("modifier_rank" in text for text in said) == (rank == 0)


CASES: list[Callable[[int, int], None]] = [
    values, changes_of_one_rank, masters_keep_their_bits, frozen_weights_change_too, nested, single_parameter,
    inside_a_forward, forward_inside, after_a_step, step_inside_is_refused, an_error_inside_frees,
    foreign_parameters_are_refused, changes_without_a_rank_are_warned_about,
]  # fmt: skip


def run(rank: int, world: int) -> dict[tuple[str, int], Any]:
    """Every case at every stage."""
    jobs = {(c.__name__, s): functools.partial(c, rank, s) for c in CASES for s in STAGES}
    return attempts_by_name(rank, world, jobs)


@functools.cache
def results() -> list[dict[tuple[str, int], Any]] | str:
    """One spawn; its error if it failed as a whole."""
    try:
        return run_ranks(run, 2, timeout=240)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_gathered(case: Callable[[int, int], None], stage: int) -> None:
    ranks = results()
    assert not isinstance(ranks, str), ranks
    for rank in ranks:
        assert rank[case.__name__, stage] is None, rank[case.__name__, stage]
