"""1-bit optimizers without ranks: what a step sends, steps before the freeze, loops by hand, blocks that are not full."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.dist.coded import Tails
from hf_dist.errors import ConfigError, ModelError
from hf_dist.optim.build import build_optimizer
from hf_dist.optim.compressed import Compressed, Message
from hf_dist.optim.lamb import Lamb
from hf_dist.sharding.layout import FlatLayout
from hf_dist.tensors.codecs import Signs
from tests.optim.onebit.training import Heads

OWN: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 10, "var_update_scaler": 2},
    "OneBitLamb": {"freeze_step": 3},
}


def made(type: str, parameters: list[nn.Parameter], **more: Any) -> Compressed:
    optimizer = build_optimizer(type, {"lr": 1e-2, "weight_decay": 0.1, **OWN[type], **more}, parameters)
    assert isinstance(optimizer, Compressed)
    return optimizer


def stepped(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: int) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def test_what_each_step_sends() -> None:
    sent: dict[str, list[Message | None]] = {}
    for type in OWN:
        p = nn.Parameter(torch.randn(4, 3))
        optimizer = made(type, [p])
        sent[type] = []
        for _ in range(12):
            sent[type].append(optimizer.message())
            stepped(optimizer, p, 1)
    gradient, momentum = Message.GRADIENT, Message.MOMENTUM
    assert sent["OneBitAdam"] == sent["OneBitLamb"] == [None] * 3 + [momentum] * 9
    # The variance changes in steps 1, 2, then 4, 6 (every 2nd), then 8 (every 4th).
    changes = {1, 2, 4, 6, 8}
    assert sent["ZeroOneAdam"] == [None if s in changes else gradient for s in range(1, 11)] + [momentum] * 2


@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb"])
def test_before_the_freeze_it_is_the_optimizer_that_it_is_named_after(type: str) -> None:
    p = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    q = copy.deepcopy(p)
    stepped(made(type, [p], freeze_step=9), p, 9)
    own = {"lr": 1e-2, "weight_decay": 0.1}
    stepped(torch.optim.AdamW([q], **own) if type == "OneBitAdam" else Lamb([q], **own), q, 9)
    assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", OWN)
def test_an_element_that_had_no_gradient_before_the_freeze_does_not_move(type: str) -> None:
    p = nn.Parameter(torch.ones(4))
    key = "var_freeze_step" if type == "ZeroOneAdam" else "freeze_step"
    optimizer = made(type, [p], **{key: 2}, weight_decay=0.0)
    for last in (0.0, 0.0, 1.0, 1.0):
        p.grad = torch.tensor([0.5, -0.5, 0.3, last])
        optimizer.step()
    assert p[3] == 1.0 and torch.isfinite(p).all() and (p[:3] != 1.0).all()


@pytest.mark.parametrize("type", OWN)
def test_a_loop_of_its_own_steps_as_the_engine_does(type: str) -> None:
    weights = []
    for by_hand in (False, True):
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": type, "params": {"lr": 1e-2, **OWN[type]}}}
        engine = hf_dist.initialize(Heads(), config=config)
        for step in range(7):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            if by_hand:
                engine.optimizer.zero_grad()
                engine(x=x, heads="ab").loss.backward()
                engine.optimizer.step()
            else:
                engine.backward(engine(x=x, heads="ab").loss)
                engine.step()
        weights.append([p.detach().clone() for p in engine.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    with pytest.raises(ModelError, match=r"zero_grad\(\) is missing .* a 1-bit optimizer turns into momentum"):
        engine(x=x, heads="ab").loss.backward()


def test_beside_another_optimizer_it_is_refused() -> None:
    model = Heads()
    one = made("OneBitAdam", list(model.body.parameters()))
    other = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=1e-2)
    with pytest.raises(ConfigError, match="a 1-bit optimizer takes one optimizer"):
        hf_dist.initialize(model, config={"train_micro_batch_size_per_gpu": 4}, optimizer=[other, one])


def test_what_is_behind_the_end_of_a_parameter_does_not_change_the_scale_of_its_block() -> None:
    layout = FlatLayout.pack([("a", (70,)), ("b", (64,)), ("c", (1,))], 2, alignment=64)
    codec = Signs(64)
    message = torch.zeros(layout.numel)
    for slot in layout.slots:
        message[slot.offset : slot.stop] = torch.randn(slot.numel)
    for part in ((0, layout.numel), layout.shard(0), layout.shard(1)):
        own = message[slice(*part)].clone()
        Tails.of(layout.gaps(), part, 64).fill(own)
        arrived = codec.rounded(own)
        for slot in layout.slots:
            start, stop = slot.within(*part)
            for first in range(start, stop, 64):
                block = slice(first, min(first + 64, stop))
                assert torch.allclose(arrived[block].abs(), own[block].abs().mean()), slot.name
                assert torch.equal(own[block], message[part[0] :][block])
