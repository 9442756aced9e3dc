"""Logits of split sequences are one process's to the bit, where ranks divide the length and the same kernel gets the same mask.

With gathered keys a kernel that knows "causal" by itself is given a mask instead, and may add up in another order.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parallel.sequence.families import make_batch, make_model

FAMILIES = ("llama", "mistral", "gemma2", "gptoss", "qwen3", "gpt2")
KINDS = ("plain", "packed", "together")


def logits(rank: int, world: int) -> dict[tuple[str, ...], torch.Tensor]:
    """Of every family and exchange."""
    import hf_dist

    found = {}
    for family in FAMILIES:
        for exchange in ("ulysses", "gather"):
            ours = {"stall_report_seconds": 0, "sequence_parallel": exchange}
            config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": world, "hf_dist": ours}
            engine = hf_dist.initialize(make_model(family), config=config)
            engine.eval()
            for kind in KINDS:
                batch = make_batch(family, kind, 5)
                del batch["labels"]
                with torch.no_grad():
                    found[family, exchange, kind] = engine(**batch, use_cache=False).logits + 0
    return found


@functools.cache
def results() -> list[Any]:
    return run_ranks(logits, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_one_process_to_the_bit(family: str) -> None:
    model = make_model(family).eval()
    for kind in KINDS:
        batch = make_batch(family, kind, 5)
        with torch.no_grad():
            expected = model(**batch, use_cache=False).logits
        for found in results():
            for exchange in ("ulysses", "gather") if kind == "packed" else ("ulysses",):
                assert torch.equal(found[family, exchange, kind], expected), (exchange, kind)
