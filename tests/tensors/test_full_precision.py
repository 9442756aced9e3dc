"""Half precision computed in fp32: the numbers of a wide copy of the model, and nothing that is stored changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_dist.tensors.full_precision import FullPrecision, as_stored
from tests.parallel.sequence.families import make_model

IDS = torch.arange(24).view(2, 12) + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gptoss", "t5", "bert", "qwen3next"])
@torch.no_grad()
def test_the_logits_are_those_of_a_wide_copy(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make_model(family).eval().to(dtype)
    wide = copy.deepcopy(model).float()
    batch = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    with FullPrecision():
        found = model(**batch).logits
    assert found.dtype == torch.float32 and all(p.dtype == dtype for p in model.parameters())
    torch.testing.assert_close(found, wide(**batch).logits, rtol=0, atol=1e-6 * float(found.abs().max()))
    assert float((model(**batch).logits.float() - found).norm() / found.norm()) > 1e-4  # it is as before afterwards


@torch.no_grad()
def test_autocast_is_wide_too() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with FullPrecision():
            torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias))


@torch.no_grad()
def test_what_is_written_and_what_is_viewed_stays_what_it_is() -> None:
    weight = torch.randn(6).bfloat16()
    with FullPrecision():
        view = weight.view(2, 3)[1]
        view.copy_(torch.full((3,), 2.0))
        view.add_(torch.ones(3))
        assert view.dtype == torch.bfloat16 and weight[3:].tolist() == [3.0] * 3
        assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.float32
        assert torch.ones(2).to(weight.dtype).dtype == torch.float32
        with as_stored():
            assert torch.ones(2).to(weight.dtype).dtype == torch.bfloat16
        assert (weight + 1).dtype == torch.float32
    with as_stored():
        assert (weight + 1).dtype == torch.bfloat16


def test_products_are_those_of_fp32_and_the_setting_comes_back() -> None:
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        with pytest.raises(KeyError), FullPrecision():
            assert products.fp32_precision == "ieee"
            raise KeyError
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before
