"""Gradients that outlive a step, in layouts whose gradients are combined between ranks at the end of a window."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_dist

LAYOUTS: dict[str, dict[str, Any]] = {
    "slices": {"tensor_parallel": {"autotp_size": 2}},
    "stages with a tied weight": {"pipeline": {"stages": 2}},
}


def make() -> Any:
    """Two blocks; embedding and head are one weight."""
    torch.manual_seed(0)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config = LlamaConfig(intermediate_size=48, use_cache=False, tie_word_embeddings=True, **small)
    return LlamaForCausalLM(config).train()


def rows(i: int) -> dict[str, torch.Tensor]:
    """One microbatch."""
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(i))
    return {"input_ids": ids, "labels": ids}


def loop(model: Any, optimizer: Any, window: Any) -> list[float]:
    """Norms of a loop that never zeroes its gradients, and steps twice with some. `window(i)` runs forward and backward."""
    norms = []
    for i in range(3):
        norms.append(float(window(i)))
        optimizer.step()
        if i == 1:
            optimizer.step()
    return norms


def on_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and weights in one process."""
    model = make()

    def window(i: int) -> float:
        (model(**rows(2 * i)).loss / 2 + model(**rows(2 * i + 1)).loss / 2).backward()
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    norms = loop(model, torch.optim.SGD(model.parameters(), lr=0.05), window)
    return norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def on_ranks(rank: int, world: int) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """The same in each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, **layout}
        engine = hf_dist.initialize(model, config=settings, optimizer=optimizer)

        def window(i: int, engine: Any = engine) -> float:
            def step(prepared: Any, batch: Any) -> Any:
                return engine.backward(prepared(**batch).loss)

            engine.run_window([rows(2 * i), rows(2 * i + 1)], step)
            return float(engine.clip_grad_norm(1.0))

        norms = loop(model, optimizer, window)
        with hf_dist.gathered(model):
            found[name] = norms, {n: p.detach().clone() for n, p in model.named_parameters()}
    return found
