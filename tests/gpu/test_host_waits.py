"""A step of bf16 with fused AdamW and clipping does not make the host wait for the GPU: CUDA's own check is an error there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hf_dist
from tests.gpu.place import DEVICE, GPUS
from tests.parity.families import make_batches, make_model

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 6,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
STEPS, WATCHED = 5, 3


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait raises; nothing is watched on a CPU."""
    if not GPUS:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("stage", range(4))
def test_the_host_waits_for_nothing_in_a_step(stage: int, checkpointing: bool) -> None:
    model = make_model("llama", checkpointing=checkpointing)
    engine = hf_dist.initialize(model, config={**CONFIG, "zero_optimization": {"stage": stage}}, device=DEVICE)
    batches = [{k: v[:6].to(DEVICE) for k, v in batch.items()} for batch in make_batches("llama", STEPS)]
    for step, batch in enumerate(batches):
        # Masks would be looked at by the model itself, which is not ours to change.
        batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        for _ in range(2):
            if step == WATCHED:
                with no_waits():
                    engine.backward(engine(**batch).loss)
                    engine.step()
            else:
                engine.backward(engine(**batch).loss)
                engine.step()
    assert engine.global_steps == STEPS
    assert engine.get_global_grad_norm() > 0
