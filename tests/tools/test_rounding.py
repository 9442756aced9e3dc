"""Another draw of a run's rounding: the same numbers but for rounding, which every draw changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_dist.tools.check.rounding import DRAWS, InParts, in_another_order, in_parts, moved
from hf_dist.tools.check.runs import routed_parameters
from tests.sweep.tiny import builders


def results(layer: nn.Module, x: Tensor, draw: int) -> list[Tensor]:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with in_parts(draw):
        out = layer(x)
        (out * torch.linspace(1, 2, out.shape[-1], dtype=out.dtype)).sum().backward()
    return [out.detach(), *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((nn.Linear, lambda i, o, bias: Conv1D(o, i))),
    *(st.integers(1, 9) for _ in range(2)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 7),
)
def test_products_in_parts_are_the_products(
    make: Callable[..., nn.Module], inputs: int, outputs: int, rows: list[int], bias: bool, draw: int
) -> None:
    layer = make(inputs, outputs, bias=bias).double()
    x = torch.randn(*rows, inputs, dtype=torch.float64)
    for found, expected in zip(results(layer, x, draw), results(layer, x, 0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_draw_rounds_the_forward_and_the_gradient_of_the_input_otherwise(dtype: torch.dtype) -> None:
    """A row's forward, which neither other rows nor a unit of fp32 in its weights change in half precision."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64, dtype=dtype), torch.randn(8, 64, dtype=dtype)
    runs = [results(layer, x, draw) for draw in range(DRAWS + 1)]
    for i in range(2):
        found = [run[i] for run in runs]
        assert all(not a.equal(b) for n, a in enumerate(found) for b in found[:n])
        assert all(float((a - found[0]).norm() / found[0].norm()) < 4 * torch.finfo(dtype).eps for a in found)


def test_a_draw_ends_with_its_context() -> None:
    layer, x = nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(8, 64, dtype=torch.bfloat16)
    before = layer(x)
    with pytest.raises(RuntimeError, match="of the model"), InParts(1):
        raise RuntimeError("of the model")
    assert layer(x).equal(before)


@pytest.mark.parametrize("rows", [8, 7])
def test_rows_stay_in_their_step(rows: int) -> None:
    for draw in range(1, DRAWS + 1):
        found = in_another_order(list(range(rows)), 4, draw)
        assert sorted(found[:4]) == [0, 1, 2, 3] and sorted(found) == list(range(rows)) != found


def test_weights_move_by_rounding_alone() -> None:
    layer = nn.Linear(64, 64)
    before = layer.weight.clone()
    moved(layer, 1)
    assert 0 < float((layer.weight - before).detach().abs().max()) < 2**-23


@pytest.mark.parametrize("name", ["NllbMoeForConditionalGeneration", "SwitchTransformersForConditionalGeneration"])
def test_experts_that_are_modules_are_beside_a_router_too(name: str) -> None:
    import transformers

    model = next(builders(getattr(transformers, name)))()
    found = {parameter for layer in routed_parameters(model) for parameter in layer}
    routed = {
        parameter for parameter, _ in model.named_parameters() if "router" in parameter or ".experts." in parameter
    }
    assert routed and routed <= found
