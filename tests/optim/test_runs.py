"""Neighbouring parameters are stepped as one where that changes nothing, and apart where it would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.optim import fused_kernel
from tests.memory.offload.training import differences, states

DIM = 24


class Sometimes(nn.Module):
    """Three layers of one unit; the middle one takes part when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, middle: bool) -> torch.Tensor:
        """Mean square."""
        x = self.first(x).relu()
        return self.head(self.last(self.middle(x) if middle else x)).square().mean()


def make_engine() -> Any:
    """ZeRO-2 in bf16 with the states on the host, the bias without decay."""
    torch.manual_seed(0)
    model = Sometimes()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups: list[Any] = [{"params": decayed}, {"params": [model.head.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero}
    return hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu")


def step(engine: Any, middle: bool, seed: int) -> None:
    """One."""
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x, middle))
    engine.step()


def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of elements at each call of the kernel."""
    calls: list[int] = []
    for func, kernel in list(fused_kernel._KERNELS.items()):

        def counted(*args: Any, kernel: Any = kernel, **kwargs: Any) -> Any:
            calls.append(args[0][0].numel())
            return kernel(*args, **kwargs)

        monkeypatch.setitem(fused_kernel._KERNELS, func, counted)
    return calls


@pytest.mark.parametrize("used", [[True] * 5, [True, True, False, True, True], [False, False, True, True, False]])
def test_bits_are_those_of_the_optimizers_own_step(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = make_engine(), make_engine()
    for i, middle in enumerate(used):
        step(engine, middle, i)
        with monkeypatch.context() as patch:
            patch.setattr(fused_kernel, "_applies", lambda batch, optimizer: False)
            step(expected, middle, i)
    assert differences(states(engine), states(expected)) == []
    counts = [
        {f.name: s for f in e.fragments.fragments for _, s in e.fragments.members[0].scalars(f)}
        for e in (engine, expected)
    ]
    assert counts[0] == counts[1]  # the fragments that the optimizer did not see were counted, too


def test_neighbours_with_equal_options_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    step(engine, True, 0)  # makes the states
    calls = kernel_calls(monkeypatch)
    step(engine, True, 1)
    matrix = DIM * DIM
    assert calls == [4 * matrix, DIM]
    calls.clear()
    step(engine, False, 2)
    assert calls == [matrix, matrix, matrix, DIM]
    calls.clear()
    step(engine, True, 3)
    assert calls == [matrix, matrix, 2 * matrix, DIM]  # the one in the middle is a step behind for ever


def test_states_that_were_replaced_are_the_ones_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a load by somebody's own code: tensors that are the optimizer's, but not where the runs were found."""
    engine, expected = make_engine(), make_engine()
    for i in range(4):
        if i == 2:
            for state in engine.optimizer.state.values():
                state.update(copy.deepcopy(state))
        step(engine, True, i)
        with monkeypatch.context() as patch:
            patch.setattr(fused_kernel, "_applies", lambda batch, optimizer: False)
            step(expected, True, i)
    assert differences(states(engine), states(expected)) == []


def test_states_that_lie_side_by_side_by_chance_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an allocator may place tensors: each is a storage of its own, and a view over two of them does not exist."""
    engine, expected = make_engine(), make_engine()
    for i in range(4):
        if i == 1:
            for key in ("exp_avg", "exp_avg_sq"):
                put_side_by_side(engine, key)
        step(engine, True, i)
        with monkeypatch.context() as patch:
            patch.setattr(fused_kernel, "_applies", lambda batch, optimizer: False)
            step(expected, True, i)
    assert differences(states(engine), states(expected)) == []


def put_side_by_side(engine: Any, key: str) -> None:
    """Give the states of each group addresses like those of one buffer, but storages of their own."""
    buffers: dict[int, bytearray] = {}
    for f in engine.fragments.fragments:
        size = f.group.master.elements.numel() * 4
        buffer = buffers.setdefault(id(f.group), bytearray(size))
        state = engine.optimizer.state[f.tensor]
        apart = torch.frombuffer(buffer, dtype=torch.float32, count=f.stop - f.start, offset=f.start * 4)
        state[key] = apart.copy_(state[key])


def test_a_parameter_that_was_moved_to_another_group_has_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As code that freezes decay or slows a layer in the middle of a training does."""
    engine, expected = make_engine(), make_engine()
    for i in range(4):
        if i == 2:
            for optimizer in (engine.optimizer, expected.optimizer):
                decayed, plain = optimizer.param_groups
                plain["params"].append(decayed["params"].pop(1))
        step(engine, True, i)
        with monkeypatch.context() as patch:
            patch.setattr(fused_kernel, "_applies", lambda batch, optimizer: False)
            step(expected, True, i)
    assert differences(states(engine), states(expected)) == []
