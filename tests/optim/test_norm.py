"""The L2 norm of a flat gradient."""

from __future__ import annotations

import pytest
import torch

from hf_dist.optim.clip import ROW, norm_of


@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, 3 * ROW + 5, 3_000_001])
def test_equals_the_sum_in_double(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).square()
    expected = float(values.double().norm())
    assert float(norm_of(values)) == pytest.approx(expected, rel=3e-7)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(value: float) -> None:
    values = torch.ones(2 * ROW)
    values[7] = value
    assert not norm_of(values).isfinite()


def test_gradients_in_half_precision_are_added_up_in_fp32() -> None:
    values = torch.full((10 * ROW,), 3.0, dtype=torch.bfloat16)
    assert float(norm_of(values)) == pytest.approx(3.0 * (10 * ROW) ** 0.5, rel=1e-6)
