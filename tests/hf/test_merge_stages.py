"""Adapters of a model over pipeline stages are merged after it is whole again; before, the call says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_dist
from hf_dist.errors import ModelError
from tests.harness import run_ranks
from tests.window.kept import make


def adapted() -> Any:
    """Adapters whose product is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    return model


def merged(rank: int, world: int) -> tuple[str, dict[str, torch.Tensor]]:
    """What the call says while stages hold the model, and the weights after it."""
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {"train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2}}
    engine = hf_dist.initialize(model, config=settings, optimizer=optimizer)
    with pytest.raises(ModelError) as said:
        engine.model.merge_and_unload()
    hf_dist.unprepare(model)
    return str(said.value), {n: p.detach().clone() for n, p in model.merge_and_unload().named_parameters()}


def test_a_merge_over_stages_says_what_to_do_and_then_works() -> None:
    wanted = dict(adapted().merge_and_unload().named_parameters())
    for said, weights in run_ranks(merged, 2):
        assert "hf_dist.unprepare(model)" in said
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-6, atol=1e-7)
