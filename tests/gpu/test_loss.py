"""The loss in chunks on CUDA: the same bits as torch's, and less memory; skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hf_dist.memory.loss.chunks import CHUNK_BYTES, Cast, Computed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, VOCABULARY = 4096, 32000
TEMPORARIES = 6
"""fp32 tensors of a chunk at a time, at most."""


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, mean: bool) -> None:
    torch.manual_seed(0)
    source = (3 * torch.randn(ROWS, VOCABULARY, device="cuda")).to(dtype)
    target = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    target[::7] = -100
    plain, chunked = source.clone().requires_grad_(), source.clone().requires_grad_()
    expected = functional.cross_entropy(plain.float(), target, reduction="mean" if mean else "sum")
    found = Computed(chunked, (Cast(torch.float32),)).cross_entropy(target, ignore_index=-100, mean=mean)
    expected.backward()
    found.backward()
    assert plain.grad is not None and chunked.grad is not None
    assert torch.equal(found, expected) and torch.equal(chunked.grad, plain.grad)


def test_its_peak_is_the_gradient_and_a_chunk() -> None:
    logits = torch.randn(ROWS, VOCABULARY, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Computed(logits, (Cast(torch.float32),)).cross_entropy(target, ignore_index=-100, mean=True).backward()
    gradient = logits.numel() * logits.element_size()
    assert torch.cuda.max_memory_allocated() - before <= gradient + TEMPORARIES * CHUNK_BYTES["cuda"]
