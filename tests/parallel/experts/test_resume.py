"""Training goes on from a checkpoint with other numbers of ranks, other `ep`, `tp`, stages: the run of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.experts import spread_jobs
from tests.parallel.experts.spread_jobs import Setting
from tests.parity.train import relative

SAVED = {
    2: [Setting("two")],
    4: [
        Setting("apart", stage=1, ep=4),
        Setting("slices", tp=2),
        Setting("stages", stage=1, pp=2, accumulation=3),
        Setting("shared", stage=2),
    ],
}
"""By ranks: what writes a checkpoint."""
RESUMED = {
    4: [("two", Setting("apart", ep=4)), ("two", Setting("shared-slices", stage=1, tp=2))],
    2: [("apart", Setting("two", stage=2)), ("slices", Setting("gathered", ep=1)), ("stages", Setting("both"))],
    1: [(name, Setting("one", stage=0, ep=1)) for name in ("two", "apart", "slices", "stages", "shared")],
}
"""By ranks, in this order: which checkpoint, and what goes on from it."""
if not FULL_GRID:  # each cut that a rank can hold; fewer experts on each than before, `test_spread.py` has
    SAVED = {2: [], 4: [setting for setting in SAVED[4] if setting.name != "shared"]}
    RESUMED = {2: RESUMED[2]}


@functools.cache
def outcomes(folder: str) -> dict[str, Any]:
    """A spawn for what saves on two ranks, one for each number of ranks then; rank 0."""
    found: dict[str, Any] = {}
    if SAVED[2]:
        run_ranks(spread_jobs.stop_and_resume, 2, (folder, SAVED[2], []), timeout=200)
    for world in (4, 2, 1):
        saved, loaded = SAVED[4] if world == 4 else [], RESUMED.get(world, [])
        if saved or loaded:
            found |= run_ranks(spread_jobs.stop_and_resume, world, (folder, saved, loaded), timeout=300)[0]
    return found


@pytest.mark.parametrize(
    ("source", "setting"),
    [
        pytest.param(source, setting, id=f"{source}-to-{setting.name}-w{world}")
        for world, rows in RESUMED.items()
        for source, setting in rows
    ],
)
def test_the_rest_of_the_run_is_one_processs(
    source: str, setting: Setting, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = outcomes(str(tmp_path_factory.getbasetemp() / "resumed"))[f"{source} to {setting.name}"]
    assert not isinstance(found, str), found
    expected = spread_jobs.one_process(Setting("plain"))
    assert found["losses"] == pytest.approx(expected["losses"][1:], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"][1:], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        assert relative(weight, expected["weights"][name]) < 1e-5, name
