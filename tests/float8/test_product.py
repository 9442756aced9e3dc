"""The product in float8 beside torchao's own: equal numbers, and no product that nobody asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import needs
from tests.covering import FULL_GRID

needs.package("torchao", "it multiplies in float8")

RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")
DTYPES = (torch.bfloat16, torch.float32) if FULL_GRID else (torch.bfloat16,)


def layers_of(recipe: str, dtype: torch.dtype, *, trained: bool = True) -> tuple[Any, Any]:
    """(torchao's layer, ours) with the same weights."""
    from hf_dist.config import load_config
    from hf_dist.float8.linear import become_float8
    from hf_dist.float8.recipe import recipe_of

    file = {"bf16": {"enabled": True}, "hf_dist": {"fp8": {"enabled": True, "recipe": recipe, "emulate": True}}}
    made = recipe_of(load_config(file))
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    ours = nn.Linear(32, 48, dtype=dtype).requires_grad_(trained)
    theirs: Any = Float8Linear(32, 48, config=made, dtype=dtype).requires_grad_(trained)
    theirs.load_state_dict(ours.state_dict())
    become_float8(ours, made)
    return theirs, ours


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 32), (16, 32)])
def test_numbers_are_those_of_torchao(recipe: str, dtype: torch.dtype, kept: bool, shape: tuple[int, ...]) -> None:
    from hf_dist.float8.casts import UnitCasts

    found = []
    theirs, ours = layers_of(recipe, dtype)
    if kept:
        UnitCasts([ours], lambda: 1).renew()
        assert ours.kept.forward is not None
    for layer in (theirs, ours):
        torch.manual_seed(1)
        x = (torch.randn(shape, dtype=dtype) * 3).requires_grad_()
        out = layer(x)
        out.backward(torch.randn(out.shape, dtype=dtype))
        found.append((out.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("trained", "first"), [(False, False), (True, True), (False, True), (True, False)])
def test_a_gradient_is_computed_where_it_is_wanted(trained: bool, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below adapters weights are frozen; in front of the first layer nothing is trained."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    _, layer = layers_of("rowwise", torch.bfloat16, trained=trained)
    layer.bias.requires_grad_()
    count, stock = [0], torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        count[0] += isinstance(a, Float8TrainingTensor)
        return stock(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    kept: list[torch.Tensor] = []
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=not first)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    out.backward(torch.ones_like(out))
    assert count[0] == 1 + trained + (not first)
    # As of a layer in bf16: the input for the weight's gradient, the weight for the input's.
    assert any(t.shape == x.shape for t in kept) == trained
    assert any(t.shape == (32, 48) for t in kept) == (not first)


def test_a_backward_in_two_parts_multiplies_as_often_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero-bubble schedules ask for the gradients of inputs first, and of weights later."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    theirs, layer = layers_of("rowwise", torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.autograd.grad(theirs(x).sum(), [x, theirs.weight])
    out, count, stock = layer(x.clone()).sum(), [0], torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        count[0] += isinstance(a, Float8TrainingTensor)
        return stock(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    (of_input,) = torch.autograd.grad(out, [x], retain_graph=True)
    (of_weight,) = torch.autograd.grad(out, [layer.weight])
    assert torch.equal(of_input, wanted[0]) and torch.equal(of_weight, wanted[1])
    assert count[0] == 2
