"""Adapters on stacked experts give PEFT's numbers without the merged stack: losses, gradients, and the bytes that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.parallel.experts.low_rank import LowRankStack, keep_adapters_low_rank
from tests.parallel.experts.spread_jobs import adapted
from tests.parity.families import make_batches, make_model, summed_loss
from tests.parity.train import relative


def trained(model: Any, family: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the adapters."""
    total, items = summed_loss(model, make_batches(family, 1)[0])
    (total / items).backward()
    return total.item() / items, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("rank", [3, 8])
def test_numbers_are_those_of_peft(family: str, implementation: str, rank: int) -> None:
    found = []
    for low in (False, True):
        base: Any = make_model(family)
        base.set_experts_implementation(implementation)
        model = adapted(base, rank)
        if low:
            assert keep_adapters_low_rank(model) == 2 * (2 if family == "deepseek_v3" else 3)
        found.append(trained(model, family))
    (loss, grads), (low_loss, low_grads) = found
    assert low_loss == pytest.approx(loss, rel=1e-6)
    assert low_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative(low_grads[name], grad) < 1e-5, name


def test_several_adapters_none_and_merged_ones_stay_pefts() -> None:
    from peft import LoraConfig

    outputs = []
    for low in (False, True):
        model = adapted(make_model("qwen3_moe"))
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(2)
        model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacks))
        if low:
            keep_adapters_low_rank(model)
        batch = make_batches("qwen3_moe", 1)[0]
        own = []
        with torch.no_grad():
            for p in (p for n, p in model.named_parameters() if "lora_B.other" in n):
                p.normal_(std=0.02)
            model.base_model.set_adapter(["default", "other"])
            own.append(summed_loss(model, batch)[0])
            model.set_adapter("other")
            own.append(summed_loss(model, batch)[0])
            with model.disable_adapter():
                own.append(summed_loss(model, batch)[0])
            model.merge_adapter()
            own.append(summed_loss(model, batch)[0])
            model.unmerge_adapter()
            own.append(summed_loss(model, batch)[0])
        outputs.append(own)
    for stock, ours in zip(*outputs, strict=True):
        assert float(ours) == pytest.approx(float(stock), rel=1e-6)
    assert len({round(float(value), 4) for value in outputs[1]}) > 2


def kept_nbytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd keeps for backward, weights left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)
    return sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)


def test_the_stack_is_not_kept_for_backward() -> None:
    import transformers as tf

    config = tf.Qwen3MoeConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        intermediate_size=128, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=2, use_cache=False,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    nbytes = []
    for low in (False, True):
        torch.manual_seed(0)
        model = adapted(tf.Qwen3MoeForCausalLM(config).train(), 8)
        if low:
            keep_adapters_low_rank(model)
        nbytes.append(kept_nbytes(model, {"input_ids": ids}))
    stacks = 2 * 16 * 3 * 128 * 128 * 4
    thin = sum(p.numel() * 4 for name, p in model.named_parameters() if ".experts." in name and "lora_" in name)
    assert nbytes[0] - nbytes[1] > stacks - 2 * thin, nbytes
    assert nbytes[1] < 0.4 * nbytes[0]


def test_what_is_not_a_product_of_experts_is_answered_with_the_merged_weights() -> None:
    base, left, right = torch.randn(3, 4, 5), torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    stack = LowRankStack(base, left, right)
    merged = base + left @ right
    assert torch.allclose(torch.einsum("bij,kj->bik", stack, torch.eye(5)), merged)
    assert torch.allclose(torch.cat([stack, stack]), torch.cat([merged, merged]))
    assert stack.shape == base.shape
    assert stack.transpose(1, 2).shape == (3, 5, 4)
    assert torch.allclose(stack.transpose(0, 1), merged.transpose(0, 1))
    rows = torch.randn(6, 5)
    assert torch.allclose(torch.nn.functional.linear(rows, stack[1]), rows @ merged[1].T, atol=1e-5)
    assert torch.allclose(rows @ stack[1].mT, rows @ merged[1].T, atol=1e-5)
    assert torch.allclose(stack[1] @ rows.T, merged[1] @ rows.T, atol=1e-5)
