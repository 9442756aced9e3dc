"""A ring's kernels of CUDA, by stand-ins with their calling convention: pairs of chunks merge to attention over all keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from hf_dist.parallel.sequence import kernels, ring
from tests.parallel.sequence.standins import Aten

CHUNKS, CHUNK, HEADS, KEYS = 4, 12, 4, 2


def tensor(device: str, dtype: torch.dtype, size: int) -> Any:
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, HEADS, CHUNK, size))


@pytest.mark.parametrize(
    ("device", "dtype", "value", "expected"),
    [
        ("cpu", torch.float32, 8, kernels.FOR_CPU),
        ("cpu", torch.bfloat16, 8, kernels.FOR_CPU),
        ("cpu", torch.float32, 12, None),
        ("cuda", torch.bfloat16, 8, kernels.FLASH),
        ("cuda", torch.float16, 8, kernels.FLASH),
        ("cuda", torch.float32, 8, kernels.EFFICIENT),
        ("cuda", torch.bfloat16, 16, kernels.EFFICIENT),
        ("cuda", torch.bfloat16, 12, None),
        ("cuda", torch.float32, 12, kernels.EFFICIENT),
        ("cuda", torch.float32, 6, None),
        ("cuda", torch.bfloat16, 256, kernels.FLASH),
        ("cuda", torch.bfloat16, 512, kernels.EFFICIENT),
        ("cpu", torch.bfloat16, 512, kernels.FOR_CPU),
    ],
)
def test_which_kernel_there_is(device: str, dtype: torch.dtype, value: int, expected: Any) -> None:
    keys = value if value >= 256 else 8
    query, key = tensor(device, dtype, keys), tensor(device, dtype, keys)
    assert kernels.kernel_for(query, key, tensor(device, dtype, value)) is expected


@pytest.mark.parametrize("kernel", ["FLASH", "EFFICIENT", "FOR_CPU"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_pairs_of_chunks_merge_to_attention_over_all_keys(
    kernel: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "FOR_CPU":
        monkeypatch.setattr(kernels, "_aten", Aten)
    monkeypatch.setattr(ring, "kernel_for", lambda *given: getattr(kernels, kernel))
    torch.manual_seed(0)
    shapes = [(2, heads, CHUNKS * CHUNK, 8) for heads in (HEADS, KEYS, KEYS, HEADS)]
    query, key, value, grad = (torch.randn(shape).to(dtype) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    repeated = [leaves[0], *(x.repeat_interleave(HEADS // KEYS, 1) for x in leaves[1:])]
    expected = functional.scaled_dot_product_attention(*repeated, is_causal=True)
    expected.backward(grad.double())

    out = query.new_zeros(query.shape, dtype=torch.float32)
    total = out.new_full(out.shape[:-1], -torch.inf)
    pairs = [(i, j, "causal" if i == j else "all") for i in range(CHUNKS) for j in reversed(range(i + 1))]
    at = [slice(i * CHUNK, (i + 1) * CHUNK) for i in range(CHUNKS)]
    scale = 8**-0.5
    for i, j, what in pairs:
        new = ring._attend(query[:, :, at[i]], key[:, :, at[j]], value[:, :, at[j]], what, scale)
        assert new[1].dtype == torch.float32  # merged in fp32, whatever the kernel's own
        out[:, :, at[i]], total[:, :, at[i]] = ring._merged(out[:, :, at[i]], total[:, :, at[i]], *new)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    final = out.to(dtype)
    for i, j, what in pairs:
        own = (query[:, :, at[i]], key[:, :, at[j]], value[:, :, at[j]], final[:, :, at[i]], total[:, :, at[i]])
        parts = ring._attend_backward(grad[:, :, at[i]], *own, what, scale)
        for target, where, part in zip(sums, (at[i], at[j], at[j]), parts, strict=True):
            target[:, :, where] += part
    for got, want in zip([out, *sums], [expected.detach(), *(x.grad for x in leaves)], strict=True):
        assert float((got.double() - want).norm() / want.norm()) < tolerance
