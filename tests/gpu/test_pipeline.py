"""Pipeline stages on GPUs, each rank with its own under NCCL, and two on one GPU over gloo, against one process on a CPU."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

from tests.gpu.place import TOLERANCE, join, needs, rehearsed, worlds
from tests.harness import run_ranks
from tests.parity.pipelines import PipelineCase, reference, run_cases
from tests.parity.train import relative

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
GRID: dict[int, list[PipelineCase]] = {
    2: rehearsed(
        [
            *(PipelineCase("Llama", stage=z, schedule=s, virtual=v, tied=True) for z in (0, 3) for s, v in SCHEDULES),
            *(PipelineCase(family, stage=3, checkpointing=True) for family in ("Qwen3Moe", "Gemma2", "T5")),
            PipelineCase("Llama", stage=3, offload=True),
        ]
    ),
    4: [
        *(PipelineCase("Llama", pp=4, stage=1, schedule=s, virtual=v, microbatches=8) for s, v in SCHEDULES),
        *(PipelineCase("Llama", pp=2, dp=2, stage=z, schedule=s, virtual=v) for z in (1, 3) for s, v in SCHEDULES),
    ],
    8: [
        *(PipelineCase("Llama", pp=1, dp=8, stage=z) for z in range(4)),
        *(PipelineCase("Llama", pp=2, dp=4, stage=z, schedule=s, virtual=v) for z in (0, 3) for s, v in SCHEDULES),
        PipelineCase("Llama", pp=4, dp=2, stage=3, microbatches=8),
        PipelineCase("Llama", pp=8, stage=1, microbatches=8),
    ],
}  # fmt: skip


def on_ranks(rank: int, world: int, shared: bool, connections: str) -> list[Any]:
    """Every case of that many ranks."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    return run_cases(rank, world, GRID[world], device=join(rank, world, shared=shared))


@functools.cache
def results(world: int, shared: bool = False, connections: str = "32") -> list[list[Any]]:
    """One spawn for all cases."""
    return run_ranks(on_ranks, world, (shared, connections), timeout=500)


def check(case: PipelineCase, ranks: list[Any]) -> None:
    """Losses and norms on every rank, weights of the stages that it holds."""
    expected = reference(*case.work)
    held = set()
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for name, weight in outcome["weights"].items():
            assert relative(weight, expected["weights"][name]) < TOLERANCE, name
        held |= outcome["weights"].keys()
    assert held == expected["weights"].keys()


def cells(sizes: list[int]) -> list[Any]:
    """(ranks, case) of the grid, skipped where there are too few GPUs."""
    found = []
    for size in worlds(sizes):
        world, marks = (size.values[0], size.marks) if hasattr(size, "values") else (size, ())
        for index, case in enumerate(GRID[world]):
            found.append(pytest.param(world, index, id=str(case), marks=marks))
    return found


@pytest.mark.parametrize(("world", "index"), cells([2, 4, 8]))
def test_equals_one_process_on_the_cpu(world: int, index: int) -> None:
    check(GRID[world][index], [rank[index] for rank in results(world)])


@needs(1)
@pytest.mark.parametrize("index", range(len(GRID[2])), ids=[str(case) for case in GRID[2]])
def test_two_stages_on_one_gpu_equal_one_process_on_the_cpu(index: int) -> None:
    check(GRID[2][index], [rank[index] for rank in results(2, shared=True)])


@needs(2)
@pytest.mark.parametrize("index", range(len(GRID[2])), ids=[str(case) for case in GRID[2]])
def test_one_queue_of_the_hardware_is_enough(index: int) -> None:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1`, as beside Megatron: a receive that waits must not stand before a send."""
    check(GRID[2][index], [rank[index] for rank in results(2, connections="1")])


def half(rank: int, world: int, shared: bool) -> tuple[list[float], int, int]:
    """(losses in bf16, bytes of the GPU allocated after training, at most)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_dist

    device = join(rank, world, shared=shared)
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
    engine = hf_dist.initialize(model, config=config, example_batch=batch, device=device)
    losses = [float(engine.train_batch(iter([batch] * 8))) for _ in range(4)]
    return losses, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=needs(2))], ids=["one_gpu", "two_gpus"])
@needs(1)
def test_bf16_and_memory_of_two_stages(shared: bool) -> None:
    whole, stages = run_ranks(half, 1, (shared,), timeout=200)[0], run_ranks(half, 2, (shared,), timeout=200)
    for losses, held, most in stages:
        assert losses == pytest.approx(whole[0], rel=2e-2)
        assert held < 0.75 * whole[1]
        assert most < 0.85 * whole[2]
    print(f"bytes held {whole[1]} -> {[s[1] for s in stages]}, at most {whole[2]} -> {[s[2] for s in stages]}")
