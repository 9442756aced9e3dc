"""Kernels of torchao's grouped product, on a CPU: its own references for the casts, torch's checks for the products."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch


def on_this_device(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """From now on torchao's product runs here. Returns the shapes of what its products return, as they come."""
    module: Any = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    utils: Any = importlib.import_module("torchao.prototype.moe_training.utils")
    calls: list[torch.Size] = []

    def by_rows(x: torch.Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _cast(x, -1)

    def by_columns(x: torch.Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = _cast(x, -2)
        return numbers.transpose(-2, -1).contiguous().transpose(-2, -1), scales

    def transposed(x: torch.Tensor, output_dtype: torch.dtype, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = utils.torch_to_3d_rowwise_float8_transpose_rhs(x, output_dtype, True)
        return numbers, scales.squeeze(1)

    def by_groups(
        one: torch.Tensor, other: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype, **_: Any
    ) -> tuple[torch.Tensor, ...]:
        assert one.is_contiguous() and other.is_contiguous()
        found = [utils.torch_to_float8_per_group_colwise(x, ends, dtype, True) for x in (one, other)]
        return tuple(part for numbers, scales in found for part in (numbers.t().contiguous().t(), scales))

    monkeypatch.setattr(module, "triton_fp8_rowwise_2d_scale_and_cast", by_rows)
    monkeypatch.setattr(module, "triton_fp8_colwise_3d_scale_and_cast", by_columns)
    monkeypatch.setattr(module, "triton_fp8_rowwise_3d_transpose_rhs", transposed)
    monkeypatch.setattr(module, "triton_fp8_per_group_colwise_scales_dual", by_groups)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *args, **kwargs: _product(calls, *args, **kwargs))
    return calls


def _cast(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    scaling: Any = importlib.import_module("torchao.float8.float8_utils")
    granularity: Any = importlib.import_module("torchao.float8.config").ScalingGranularity.AXISWISE
    e4m3 = torch.float8_e4m3fn
    scales = scaling.tensor_to_scale(
        x, e4m3, scaling_granularity=granularity, axiswise_dim=dim, round_scales_to_power_of_2=True
    )
    return scaling.to_fp8_saturated(x.float() * scales, e4m3), scales


def _product(
    calls: list[torch.Size],
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Checked as torch checks it for a GPU. What the kernel leaves unwritten is not a number."""
    shown = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (a, b, scale_a, scale_b)]
    out = torch.ops.aten._scaled_grouped_mm(*shown, offs.to("meta"), out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    made = torch.full(out.shape, float("nan"))
    ends = [0, *offs.tolist()]
    for n, (first, last) in enumerate(itertools.pairwise(ends)):
        assert last > first and (last - first) % 16 == 0, "a group of rows that the kernels do not take"
        if b.dim() == 3:
            wide = a[first:last].float() * scale_a[first:last, None]
            made[first:last] = wide @ (b[n].float() * scale_b[n])
        else:
            left = a[:, first:last].float() * scale_a[n * len(a) : (n + 1) * len(a), None]
            made[n] = left @ (b[first:last].float() * scale_b[n * b.shape[1] : (n + 1) * b.shape[1]])
    calls.append(out.shape)
    return made.to(out_dtype)
