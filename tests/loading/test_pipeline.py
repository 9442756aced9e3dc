"""A pipeline rank reads the weights of its own stages, and nothing of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks


def load(rank: int, world: int, folder: str) -> tuple[float, list[str], int]:
    """(loss of a step, parameters that were read in full, elements held)."""
    from transformers import AutoModelForCausalLM

    import hf_dist
    from hf_dist.sharding.lazy import LazyWeight

    in_full: list[str] = []
    LazyWeight.materialize = lambda self, tensor: in_full.append(str(tensor.shape))  # type: ignore[method-assign]
    model = hf_dist.from_pretrained(AutoModelForCausalLM, folder)
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **({"pipeline": {"stages": world}} if world > 1 else {}),
    }
    engine = hf_dist.initialize(model, config=config, example_batch=batch)
    loss = float(engine.train_batch(iter([batch] * 2)))
    return loss, in_full, sum(group.layout.num_params for group in engine.sharded.groups)


def test_stages_are_streamed(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **shape))
    model.save_pretrained(tmp_path)
    whole, stages = run_ranks(load, 1, (str(tmp_path),)), run_ranks(load, 2, (str(tmp_path),))
    assert [read for _, read, _ in stages] == [[], []]
    assert sum(numel for _, _, numel in stages) == sum(p.numel() for p in model.parameters())
    assert [loss for loss, _, _ in stages] == pytest.approx([whole[0][0]] * 2, rel=1e-6)
