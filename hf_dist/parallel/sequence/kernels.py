"""Attention kernels that return the log of the sum of exponentials, and accept the final one in backward.

They are the operators behind `F.scaled_dot_product_attention` (torch 2.13). A ring merges their results for subsets of the
keys, in fp32. All take (B, H, q, D) queries and (B, H, k, D) keys and values with equally many heads, and a scale. They mask
nothing, or the upper triangle.

    for_cpu       CPU: equal D
    flash         CUDA: half precision, equal D
    efficient     CUDA: all other cases; its sums are padded to 32 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """One attention kernel."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Tensors]
    """Query, key, value, causal, scale -> output (B, H, q, D) and log of the sum (B, H, q)."""
    backward: Callable[[torch.Tensor, Tensors, Tensors, bool, float], Tensors]
    """Gradient of the output, (query, key, value), (final output, final log), causal, scale -> gradients of the three."""


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """The kernel for these tensors; None if there is none (CPU with values of another size than keys, odd heads on a GPU).

    CUDA's kernels read 16 bytes at a time, and flash attention takes heads of up to 256 (torch: `flash_api.cpp`,
    `sdp_utils.cpp`). No GPU has confirmed it.
    """
    keys, values = key.shape[-1], value.shape[-1]
    if query.device.type == "cpu":
        return FOR_CPU if keys == values else None
    half = query.dtype in (torch.float16, torch.bfloat16)
    if keys % (multiple := 8 if half else 4) or values % multiple:
        return None
    return FLASH if half and keys == values <= _FLASH_MOST else EFFICIENT


def _aten() -> Any:
    return torch.ops.aten


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, total = _aten()._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, total


def _cpu_backward(grad: torch.Tensor, inputs: Tensors, outputs: Tensors, causal: bool, scale: float) -> Tensors:
    out, total = outputs
    found = _aten()._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, out, total.contiguous(), 0.0, causal, scale=scale
    )
    return tuple(found)


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths = (None, None, q.shape[1], k.shape[1])
    out, total, *_ = _aten()._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), total


def _flash_backward(grad: torch.Tensor, inputs: Tensors, outputs: Tensors, causal: bool, scale: float) -> Tensors:
    g, q, k, v, out = (x.transpose(1, 2) for x in (grad, *inputs, outputs[0]))
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # without dropout there is no random state
    tensors, lengths = (g, q, k, v, out, outputs[1].contiguous()), (None, None, q.shape[1], k.shape[1])
    found = _aten()._flash_attention_backward(*tensors, *lengths, 0.0, causal, nothing, nothing[:0], scale=scale)
    return tuple(x.transpose(1, 2) for x in found)


def _efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, total, *_ = _aten()._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, total[..., : q.shape[2]]


def _efficient_backward(grad: torch.Tensor, inputs: Tensors, outputs: Tensors, causal: bool, scale: float) -> Tensors:
    out, total = outputs
    total = functional.pad(total, (0, -total.shape[-1] % _ROWS), value=float("inf")).contiguous()  # padding rows
    nothing = torch.zeros((), dtype=torch.int64, device=grad.device)
    tensors, wanted = (grad, *inputs, None, out, total, nothing, nothing), [True, True, True, False]
    found = _aten()._scaled_dot_product_efficient_attention_backward(*tensors, 0.0, wanted, causal, scale=scale)
    return tuple(found[:3])


_FLASH_MOST = 256
"""Largest head of flash attention. Gemma 4's global layers have 512."""
_ROWS = 32
"""The sums of the efficient kernel are padded to a multiple of this."""
FOR_CPU = Kernel(_cpu_forward, _cpu_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
