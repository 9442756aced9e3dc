"""Pipeline stages on CUDA: two ranks on the one GPU over gloo, against one process on the CPU; skipped without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.pipelines import PipelineCase, reference, run_cases
from tests.parity.train import relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
CASES = [
    *(PipelineCase("Llama", stage=stage, schedule=name, virtual=v, tied=True) for stage in (0, 3) for name, v in SCHEDULES),
    *(PipelineCase(family, stage=3, checkpointing=True) for family in ("Qwen3Moe", "Gemma2", "T5")),
]  # fmt: skip
TOLERANCE = 1e-4
"""Sums are made in another order than on the CPU."""


def on_gpu(rank: int, world: int) -> list[Any]:
    """Every case on this rank."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    return run_cases(rank, world, CASES, device="cuda:0")


@functools.cache
def results() -> list[list[Any]]:
    """One spawn for all cases."""
    return run_ranks(on_gpu, 2, timeout=500)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_equals_one_process_on_the_cpu(index: int) -> None:
    expected = reference(*CASES[index].work)
    for rank in results():
        outcome = rank[index]
        assert not isinstance(outcome, str), outcome
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for name, weight in outcome["weights"].items():
            assert relative(weight, expected["weights"][name]) < TOLERANCE, name


def half(rank: int, world: int) -> tuple[list[float], int, int]:
    """(losses in bf16, bytes of the GPU allocated after training, at most)."""
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_dist

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, use_cache=False, **shape))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **({"pipeline": {"stages": world}} if world > 1 else {}),
    }
    ids = torch.arange(512).view(2, 256)
    batch = {"input_ids": ids, "labels": ids}
    engine = hf_dist.initialize(model, config=config, example_batch=batch, device="cuda:0")
    losses = [float(engine.train_batch(iter([batch] * 8))) for _ in range(4)]
    return losses, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def test_bf16_and_memory_of_two_stages() -> None:
    whole, stages = run_ranks(half, 1, timeout=200)[0], run_ranks(half, 2, timeout=200)
    for losses, held, most in stages:
        assert losses == pytest.approx(whole[0], rel=2e-2)
        assert held < 0.75 * whole[1]
        assert most < 0.85 * whole[2]
    print(f"bytes held {whole[1]} -> {[s[1] for s in stages]}, at most {whole[2]} -> {[s[2] for s in stages]}")
