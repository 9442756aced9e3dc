"""Stacked experts in float8: padded groups, the numbers of torchao's functions, and what its kernels are called with."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dist.config import load_config
from hf_dist.float8 import stacks
from hf_dist.float8.choice import Choice, choose
from hf_dist.float8.convert import choose_layers, convert
from hf_dist.float8.groups import padded_groups
from hf_dist.float8.linear import plain
from hf_dist.float8.stacks import GroupedProduct, become_float8_stack, is_float8_stack, matrices_of
from hf_dist.parallel.experts.low_rank import keep_adapters_low_rank
from hf_dist.parallel.experts.spread import find_experts
from tests import needs
from tests.float8.grouped_kernels import on_this_device
from tests.float8.training import Case, adapted_by_hand, by_hand, model_of, product_of, recipe_of
from tests.parallel.experts.spread_jobs import adapted
from tests.parity.families import make_model
from tests.parity.train import relative

needs.package("torchao", "it multiplies in float8")

CPU = torch.device("cpu")
CASE = Case(family="experts", bf16=False)


def config(**section: Any) -> Any:
    """With the section on."""
    return load_config({"bf16": {"enabled": True}, "hf_dist": {"fp8": {"enabled": True, "emulate": True, **section}}})


def chosen(model: nn.Module, device: torch.device = CPU, **section: Any) -> Choice:
    """What is converted."""
    found = choose_layers(model, config(**section), device, [8])
    assert found is not None
    return found


# ---- groups


@given(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=6), st.integers(0, 3))
def test_padded_groups_are_those_of_a_loop(sizes: list[int], behind: int) -> None:
    ends, count = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + behind
    found = padded_groups(ends, count)
    wanted, place = [], 0
    for size in sizes:
        wanted += range(place, place + size)
        place += max(16, -(-size // 16) * 16)
    wanted += range(place, place + behind)
    assert found.place.tolist() == wanted and found.ends.dtype == torch.int32
    assert found.ends.diff(prepend=torch.zeros(1)).remainder(16).eq(0).all() and found.ends[-1] == place
    assert found.length % 16 == 0 and place + behind <= found.length <= count + 15 + 16 * len(sizes)
    rows = torch.randn(count, 3)
    assert torch.equal(found.gathered(found.spread(rows)), rows)
    assert found.spread(rows).ne(0).any(1).sum() == count


def test_the_host_reads_no_number_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, **_: Any) -> torch.Tensor:
        return a @ b[0]

    monkeypatch.setattr(stacks, "torchao_product", lambda: product)
    on_gpu = GroupedProduct(replace(recipe_of("rowwise"), emulate=False))
    with FakeTensorMode():  # has none
        rows, weight = torch.empty(50, 64, requires_grad=True), torch.empty(4, 64, 32, requires_grad=True)
        ends = torch.empty(4, dtype=torch.int32)
        out = on_gpu(rows, weight, ends, lambda: padded_groups(ends, 50))
        out.sum().backward()
        assert out.shape == (50, 32)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            GroupedProduct(recipe_of("rowwise"))(rows, weight, ends, lambda: padded_groups(ends, 50))


# ---- numbers


def routed(tokens: int, experts: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, two experts for each, and their weights."""
    g = torch.Generator().manual_seed(0)
    index = torch.stack([torch.tensor(experts)[torch.randperm(len(experts), generator=g)[:2]] for _ in range(tokens)])
    return torch.randn(tokens, 64, generator=g, dtype=dtype), index, torch.rand(tokens, 2, generator=g, dtype=dtype)


def both_ways(function: Any, experts: nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The result, and the gradients of the rows and weights."""
    experts.zero_grad()
    rows = given[0].clone().requires_grad_()
    out = function(rows, *given[1:])
    out.float().square().sum().backward()
    return [out.detach(), rows.grad, *(p.grad.clone() for p in experts.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [[0, 1, 2, 3], [1, 3]])
def test_experts_multiply_as_torchaos_function_does(experts: list[int], dtype: torch.dtype) -> None:
    module = next(iter(find_experts(model_of(CASE)).values())).to(dtype)
    given = routed(20, experts, dtype)
    stock = both_ways(module, module, given)
    hand = functools.partial(by_hand, module, product_of(recipe_of("rowwise")))
    wanted = both_ways(hand, module, given)
    become_float8_stack(module, GroupedProduct(recipe_of("rowwise")))
    for mine, one, other in zip(both_ways(module, module, given), wanted, stock, strict=True):
        assert relative(mine, one) < (1e-6 if dtype == torch.float32 else 1e-2) < 0.03 < relative(one, other)


def test_a_call_without_rows_gives_the_weights_gradients_of_zeros() -> None:
    module = next(iter(find_experts(model_of(CASE)).values()))
    become_float8_stack(module, GroupedProduct(recipe_of("rowwise")))
    given = torch.zeros(0, 64), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    assert not any(grad.any() for grad in both_ways(module, module, given))


def test_adapters_lie_over_experts_in_float8() -> None:
    """The base multiplies in float8, the thin products as they are."""
    outputs = []
    for ours in (True, False):
        model: Any = adapted(model_of(CASE), 8)
        if ours:
            assert keep_adapters_low_rank(model) == 6
            found = convert(chosen(model, skip=["self_attn"]), config(skip=["self_attn"]))
            assert len(found.stacks) == 3 and not found.chosen
        else:
            product = product_of(recipe_of("rowwise"))
            for layer in model.model.model.layers:
                layer.mlp.experts.forward = functools.partial(adapted_by_hand, layer.mlp.experts, product)
        out = model(torch.arange(20).view(2, 10), labels=torch.arange(20).view(2, 10))
        out.loss.backward()
        outputs.append((out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (logits, grads), (wanted, wanted_grads) = outputs
    assert relative(logits, wanted) < 1e-6 and grads.keys() == wanted_grads.keys()
    assert all(relative(grad, wanted_grads[name]) < 1e-5 for name, grad in grads.items())


# ---- what torchao's kernels get


@pytest.mark.parametrize("sizes", [[3, 16, 0, 21], [0, 0, 0, 40], [1, 1, 1, 1]])
def test_torchaos_product_takes_what_it_is_given(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function runs on a CPU, with kernels that check what the GPU's ask for, and gives the emulated numbers."""
    calls = on_this_device(monkeypatch)
    recipe = recipe_of("rowwise")
    products = [GroupedProduct(recipe), GroupedProduct(replace(recipe, emulate=False))]
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 32, generator=g).bfloat16()
    weight = torch.randn(4, 48, 32, generator=g).bfloat16()
    ends = torch.tensor(sizes).cumsum(0).int()
    found = []
    for product in products:
        a, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        out = torch.nn.functional.grouped_mm(a, stacks.Float8Stack(w, product, {}).transpose(-2, -1), offs=ends)
        out.float().square().sum().backward()
        found.append((out.detach(), a.grad, w.grad))
    assert len(calls) == 3  # forward, and two in backward
    for emulated, mine in zip(*found, strict=True):
        assert mine.dtype == torch.bfloat16 and relative(mine, emulated) < 5e-3


# ---- which


def test_what_stays_in_bf16_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CASE)
    assert list(chosen(model).stacks) == [f"model.layers.{n}.mlp.experts" for n in range(3)]
    assert (
        chosen(model, recipe="tensorwise").rows()[1] == "3 modules of experts multiply in float8, with scales of rows"
    )

    def reason(model: nn.Module = model, **section: Any) -> str:
        found = chosen(model, section.pop("device", CPU), **section)
        (why,) = [why for why, paths in found.left.items() if any(path.endswith(".experts") for path in paths)]
        assert not found.stacks and any(f"3 {why}" in row for row in found.rows())
        return why.removeprefix("stacks of experts ")

    assert reason(skip=["experts"]) == "named in skip"
    assert reason(recipe="rowwise_with_gw_hp") == "for which torchao has no rowwise_with_gw_hp"
    assert reason(recipe="mxfp8") == "for which mxfp8 is not available"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability in ((8, 9), (10, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if capability != (9, 0):
            assert reason(device=torch.device("cuda"), emulate=False) == "whose products need compute capability 9.0"
    assert len(chosen(model, torch.device("cuda"), emulate=False).stacks) == 3
    monkeypatch.setattr(stacks, "_FUNCTION", "no_such_function")
    why = reason(device=torch.device("cuda"), emulate=False)
    assert why == "for which the installed torchao has no product"
    for module in find_experts(model).values():
        module.is_transposed = True
    assert reason() == "in the layout (experts, in, out)"
    model.set_experts_implementation("eager")
    assert reason() == "whose implementation is not grouped_mm"
    odd = make_model("qwen3_moe")
    odd.set_experts_implementation("grouped_mm")
    assert [why for why in choose(odd).left if "experts" in why] == [
        "stacks of experts with sizes that are no multiple of 16"
    ]
    assert not matrices_of(nn.Conv1d(16, 16, 4))


def test_experts_are_the_same_objects_and_come_back() -> None:
    model = model_of(CASE)
    before, kinds = {n: id(p) for n, p in model.named_parameters()}, {n: type(m) for n, m in model.named_modules()}
    found, x = find_experts(model), {"input_ids": torch.arange(12).view(1, 12)}
    stock = model(**x).logits
    converted = convert(chosen(model), config())
    assert before == {n: id(p) for n, p in model.named_parameters()} and find_experts(model) == found
    assert {n for n, m in model.named_modules() if is_float8_stack(m)} == set(converted.stacks) == set(found)
    rounded = model(**x).logits
    with plain(model):
        assert kinds == {n: type(m) for n, m in model.named_modules()}
        assert torch.equal(model(**x).logits, stock)
    for other in (model, copy.deepcopy(model)):
        assert torch.equal(other(**x).logits, rounded) and not torch.equal(rounded, stock)
    for module in converted.stacks.values():
        module.gate_up_proj.data = torch.zeros(4, 24, 64)
    assert not converted.of_slices().stacks and len(converted.of_slices().left["whose slices have such sizes"]) == 3
