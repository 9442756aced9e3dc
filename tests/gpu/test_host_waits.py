"""A step of bf16 with fused AdamW and clipping does not make the host wait for the GPU, as CUDA's own check tells."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


THEIRS = "/transformers/masking_utils.py"
"""HF asks in each forward whether rows are padded or packed; a simulated GPU does not see it."""


@contextmanager
def waits() -> Iterator[list[str]]:
    """A list to which each place is added at which the host waits for the GPU, once the block ends; nothing on a CPU."""
    found: list[str] = []
    if not GPUS:
        yield found
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{each.filename}:{each.lineno}" for each in said if "synchroniz" in str(each.message)]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("stage", range(4))
def test_the_host_waits_for_nothing_in_a_step(stage: int, checkpointing: bool) -> None:
    model = make_model("llama", checkpointing=checkpointing)
    engine = hf_dist.initialize(model, config={**CONFIG, "zero_optimization": {"stage": stage}}, device=DEVICE)
    batches = [{k: v[:6].to(DEVICE) for k, v in batch.items()} for batch in make_batches("llama", STEPS)]
    for step, batch in enumerate(batches):
        batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        for _ in range(2):
            with waits() if step == WATCHED else nullcontext([]) as found:
                engine.backward(engine(**batch).loss)
                engine.step()
            assert [place for place in found if THEIRS not in place] == []
            assert len(found) <= 1
    assert engine.global_steps == STEPS
    assert engine.get_global_grad_norm() > 0
