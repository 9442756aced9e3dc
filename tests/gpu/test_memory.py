"""What the plan says beside what the GPU's allocator says, for a Llama of 0.2B parameters."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.planning.planner import Planner, Workload
from tests.gpu.place import DEVICE, GPUS
from tests.gpu.results import record

WIDE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
NARROW = {**WIDE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
SIZES, SEQ, ROWS = (WIDE, 1024, 4) if GPUS else (NARROW, 32, 2)
MUST = 0.25
"""How far the plan may be off; `RESULTS.md` has how far it was."""
HOST = {"offload_optimizer": {"device": "cpu"}}


def llama() -> Any:
    """With random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False, attn_implementation="sdpa"))


def peak(config: dict[str, Any]) -> int:
    """Bytes that tensors took at most in the second and third step; 0 on a CPU."""
    gc.collect()
    torch.manual_seed(0)
    engine = hf_dist.initialize(llama(), config=config, device=DEVICE)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, SEQ), device=DEVICE)
    for step in range(3):
        if step == 1 and GPUS:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    return torch.cuda.max_memory_allocated() if GPUS else 0


@pytest.mark.parametrize("micro", [1, 2], ids=["one_microbatch", "two_microbatches"])
@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (2, {}), (3, {}), (3, HOST)], ids=["z0", "z2", "z3", "z3-host"])
def test_the_plan_is_what_the_gpu_needs(stage: int, zero: dict[str, Any], micro: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    resolved = resolve_without_trainer(load_config(config), hidden_size=SIZES["hidden_size"], on_gpu=GPUS > 0)
    with torch.device("meta"):
        meta = llama()
    planned = Planner(meta, 1, Workload(ROWS, SEQ)).plan(resolved).device_peak
    measured = peak(config)
    assert planned > 0
    if GPUS:
        record("memory", {"case": f"z{stage} {' '.join(zero)} x{micro}", "planned": planned, "measured": measured})
        assert planned == pytest.approx(measured, rel=MUST)
