"""Layers in MXFP8: rows that fill no block, what stays as it is, and what is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.float8 import blocks
from hf_dist.float8.blocks import become_mxfp8, block_recipe, is_mxfp8
from hf_dist.float8.convert import choose_layers, convert
from hf_dist.float8.linear import plain
from tests import needs
from tests.float8.training import Case, model_of

needs.package("torchao", "it multiplies in float8")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(**section: Any) -> Any:
    """With the recipe on."""
    section = {"enabled": True, "recipe": "mxfp8", "emulate": True, **section}
    return load_config({"bf16": {"enabled": True}, "hf_dist": {"fp8": section}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33,), (2, 5), (64,)])
def test_rows_of_zeros_fill_the_last_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    recipe = block_recipe(emulate=True)
    stock, x = nn.Linear(64, 32, dtype=dtype), torch.randn(*shape, 64, dtype=dtype)
    with torch.no_grad():
        stock.bias.normal_()
    wanted = recipe.kind(64, 32, dtype=dtype, **recipe.options)
    wanted.load_state_dict(stock.state_dict())
    rows = x.flatten(0, -2)
    filled = torch.cat([rows, rows.new_zeros(-len(rows) % 32, 64)]).requires_grad_()
    one = wanted(filled)[: len(rows)].view(*shape, 32)
    one.square().sum().backward()
    become_mxfp8(stock, recipe)
    again = x.clone().requires_grad_()
    other = stock(again)
    other.square().sum().backward()
    assert torch.equal(one, other) and not torch.equal(one, nn.functional.linear(x, stock.weight, stock.bias))
    assert torch.equal(stock.weight.grad, wanted.weight.grad) and torch.equal(stock.bias.grad, wanted.bias.grad)
    assert torch.equal(again.grad, filled.grad[: len(rows)].view_as(x))


class Sizes(nn.Module):
    """Multiples of 16 and of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow, self.last = (nn.Linear(64, n) for n in (64, 96, 48, 64))


def test_sizes_are_multiples_of_32_and_other_kinds_stay() -> None:
    model = Sizes()
    found = choose_layers(model, config(), CPU)
    assert found is not None and set(found.chosen) == {"wide"}
    assert found.rows()[0] == "1 linear layers multiply in MXFP8"
    assert found.left["with sizes that are no multiple of 32"] == ["narrow"]
    weight = model.wide.weight
    done = convert(found, config())
    assert is_mxfp8(model.wide) and isinstance(model.wide, nn.Linear) and model.wide.weight is weight
    with plain(model):
        assert type(model.wide) is nn.Linear
    assert is_mxfp8(model.wide)
    model.wide.weight.data = torch.zeros(48, 64)
    assert not done.of_slices().chosen
    stays = (
        r"no linear layer of the model can multiply in MXFP8: .*with weights of \(in, out\), which MXFP8 does not take"
    )
    with pytest.raises(ConfigError, match=stays):
        choose_layers(model_of(Case(family="gpt2")), config(), CPU)


def test_what_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sizes()
    other = r'Set "hf_dist.fp8.emulate": true.*or set "recipe": "rowwise"'
    with pytest.raises(ConfigError, match=rf"hf_dist.fp8.recipe: mxfp8 .*a cpu has no products in MXFP8.*{other}"):
        choose_layers(model, config(emulate=False), CPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        what = "A GPU has compute capability 9.0, and products in MXFP8 need 10.0"
        if capability == (10, 0):
            monkeypatch.setattr(blocks, "_KERNEL", "torchao::no_such_kernel")
            what = "the installed torchao did not load its kernel mxfp8_quantize"
        with pytest.raises(ConfigError, match=rf"hf_dist.fp8.recipe: mxfp8 .*{what}"):
            choose_layers(model, config(emulate=False), CUDA)
    monkeypatch.setattr("hf_dist.float8.recipe.kernel_is_missing", lambda: False)
    found = choose_layers(model, config(emulate=False), CUDA)
    assert found is not None and set(found.chosen) == {"wide"}
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    with pytest.raises(ConfigError, match=r"hf_dist.fp8.recipe: mxfp8 .*has no such products.*Install torchao 0.18"):
        choose_layers(model, config(), CPU)
