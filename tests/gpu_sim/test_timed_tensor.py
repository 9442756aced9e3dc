"""What travels along `tp` and shows in the timed model, with sums of backward that begin early and without."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.gpu_sim import costs, library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.timed_tensor import CASE, VARIANTS, exposed, hidden
from tests.gpu_sim.trace import COMPUTE

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

SIZE, SMALL = 4, replace(CASE, layers=2, vocabulary=4096)
REGIONS = (False, True) if FULL_GRID else (True,)


@functools.cache
def outcomes() -> dict[Any, Any]:
    variants = [variant for variant in VARIANTS if variant[0] in REGIONS]
    (found,) = simulate("tests.gpu_sim.timed_tensor:run", SIZE, [costs.NETWORK], SMALL, variants)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("regions", REGIONS)
def test_early_sums_hide_behind_the_weight_gradients_and_cost_no_computation(regions: bool) -> None:
    late, early = (outcomes()[costs.NETWORK, (regions, overlap)] for overlap in (False, True))
    assert late.hung == early.hung == []
    assert early.busy[COMPUTE] == pytest.approx(late.busy[COMPUTE], rel=0.005)
    saved = late.seconds - early.seconds
    assert saved == pytest.approx(hidden(SMALL, SIZE, costs.NETWORK, regions=regions), rel=0.1)
    assert exposed(early) < 0.9 * exposed(late)
