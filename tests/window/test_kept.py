"""Gradients stay after a step until they are zeroed, also where slices and stages add up their parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.window import kept


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    """What two ranks found."""
    return run_ranks(kept.on_ranks, 2)


@pytest.mark.parametrize("layout", kept.LAYOUTS)
def test_a_loop_without_zero_grad_gives_the_numbers_of_torch(layout: str, two_ranks: list[Any]) -> None:
    norms, weights = kept.on_torch()
    for rank in two_ranks:
        found, own = rank[layout]
        assert found == pytest.approx(norms, rel=1e-5)
        for name, value in own.items():  # of this rank's stages
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5 * float(weights[name].abs().max()))
