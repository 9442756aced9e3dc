"""Kernels of CUDA, computed by plain torch with the same calling convention: flash_attn's functions, flex attention by
its mask, and the operators under scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from tests.covering import FULL_GRID

ROWS = 32


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """(B, S, H, D); the last query sees the last key."""
    assert dropout_p == 0 and softcap == 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])[None]
    seen = torch.ones(at.shape[0], key.shape[1], dtype=torch.bool)
    if causal:
        seen &= key <= at
    left, right = window_size
    seen &= (key >= at - left) if left >= 0 else True
    seen &= (key <= at + right) if right >= 0 else True
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """(tokens, H, D): documents one after the other."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(ends_q) == len(ends_k) and ends_q[-1] == len(q) and ends_k[-1] == len(k)
    parts = []
    for i in range(len(ends_q) - 1):
        of_q, of_k = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        assert of_q.stop - of_q.start <= max_seqlen_q and of_k.stop - of_k.start <= max_seqlen_k
        one = flash_attn_func(q[of_q][None], k[of_k][None], v[of_k][None], 0.0, softmax_scale, causal, window_size)
        parts.append(one[0])
    return torch.cat(parts)


def use_kernel(model: Any, kernel: str) -> None:
    """Have `model` attend by `kernel`, which is not installed or not for CPUs, from here on in this process."""
    if kernel == "flex_attention":
        from torch.nn.attention.flex_attention import create_mask
        from transformers.integrations import flex_attention as hf

        def dense(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool, scale: float, **more: Any) -> Any:
            assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
            seen = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], q.device)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)

        mock.patch.object(hf, "compile_friendly_flex_attention", dense).start()
        if not FULL_GRID:  # compiling the mask takes ten seconds per rank
            torch.compiler.set_stance("force_eager")
    else:
        from transformers import modeling_flash_attention_utils as hf_flash

        functions = (flash_attn_func, flash_attn_varlen_func, None, hf_flash._pad_input, hf_flash._unpad_input)
        mock.patch.object(hf_flash, "_lazy_imports", lambda *given, **more: functions).start()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = kernel


# ---- operators


class Aten:
    """The three pairs of operators that `hf_dist/parallel/sequence/kernels.py` calls, as torch 2.13 declares them."""

    def _flash_attention_forward(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
        debug: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (cu_q, cu_k, dropout, debug) == (None, None, 0.0, False) and (max_q, max_k) == (q.shape[1], k.shape[1])
        out, total = _forward(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2).to(q.dtype), total.float(), torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def _flash_attention_backward(
        self, g: Any, q: Any, k: Any, v: Any, out: Any, total: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
        dropout: float, causal: bool, rng_state: Any, unused: Any, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (cu_q, cu_k, dropout) == (None, None, 0.0) and (max_q, max_k) == (q.shape[1], k.shape[1])
        assert total.is_contiguous() and total.dtype == torch.float32 and rng_state.dtype == torch.uint64
        given = (x.transpose(1, 2) for x in (g, q, k, v, out))
        return tuple(x.transpose(1, 2).to(q.dtype) for x in _backward(*given, total, causal, scale))

    def _scaled_dot_product_efficient_attention(
        self, q: Any, k: Any, v: Any, bias: Any, with_total: bool, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        assert bias is None and with_total and dropout == 0
        out, total = _forward(q, k, v, causal, scale)
        total = functional.pad(total, (0, -total.shape[-1] % ROWS), value=float("inf"))
        return out.to(q.dtype), total.float(), torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    def _scaled_dot_product_efficient_attention_backward(
        self, g: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, total: Any, seed: Any, offset: Any, dropout: float,
        wanted: list[bool], causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert bias is None and dropout == 0 and wanted == [True, True, True, False] and total.shape[-1] % ROWS == 0
        found = _backward(g, q, k, v, out, total[..., : q.shape[2]], causal, scale)
        return (*(x.to(q.dtype) for x in found), None)


def _scores(q: Any, k: Any, causal: bool, scale: float) -> torch.Tensor:
    scores: torch.Tensor = q.double() @ k.double().transpose(-1, -2) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if causal else torch.ones(1, dtype=torch.bool)
    return scores.masked_fill(~seen, -torch.inf)


def _forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, causal, scale)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def _backward(g: Any, q: Any, k: Any, v: Any, out: Any, total: Any, causal: bool, scale: float) -> Any:
    shares = torch.exp(_scores(q, k, causal, scale) - total.double()[..., None])
    g, out = g.double(), out.double()
    d_scores = shares * (g @ v.double().transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) * scale
    return d_scores @ k.double(), d_scores.transpose(-1, -2) @ q.double(), shares.transpose(-1, -2) @ g
