"""Products in eight bits on a simulated GPU: which kernels are asked for, in which layouts, and that nobody waits for them."""

from __future__ import annotations

import pytest

from tests import needs
from tests.covering import FULL_GRID
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.training import SMALL, Report, Setting

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))
needs.package("torchao", "it multiplies in float8")

LINEAR = 7 * SMALL.layers - 1
"""Layers that multiply in eight bits: those of the blocks, but for the first."""
PRODUCTS = {"rowwise": 3, "tensorwise": 3, "rowwise_with_gw_hp": 2}
"""Products of a layer in eight bits: forward, gradient of the input, and of the weight."""


ALL = [("rowwise", 1), ("rowwise", 3), ("tensorwise", 2), ("rowwise_with_gw_hp", 0)]
"""Casts that a window keeps; gathers of one byte an element."""


@pytest.mark.parametrize(("recipe", "stage"), ALL if FULL_GRID else ALL[:1])
def test_the_kernels_are_those_of_float8_and_the_host_waits_for_none(recipe: str, stage: int) -> None:
    found: Report
    # A layout that cuBLAS does not take raises there (`recorder.py`).
    (found,) = simulate("tests.gpu_sim.training:train", Setting(stage=stage, fp8=recipe, accumulation=2))
    assert found.scaled == 2 * LINEAR * PRODUCTS[recipe]
    assert found.faults == [] and found.waits == [] and found.late == []
