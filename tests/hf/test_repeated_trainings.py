"""A search over hyperparameters finds in every layout what one process finds; evaluations leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import some_of
from tests.hf.layout_jobs import matrices, sequences, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world

JOBS = "tests.hf.repeated:"
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": stages(2),
    "matrices": matrices(2),
    "sequences": sequences(2),
    "data": {"zero_optimization": {"stage": 3}},
}
STOCK: Job = (JOBS + "searched", {"config": None, "micro": 4})
SEARCHES: dict[str, Job] = {
    name: (
        JOBS + "searched",
        {"config": {"zero_optimization": {"stage": 1}, **layout}, "micro": 2 if name == "data" else 4},
    )
    for name, layout in LAYOUTS.items()
}
SEARCHES = some_of(SEARCHES, "stages", "data")  # nothing of a search asks how the ranks of a row share it
LOADERS: Job = (JOBS + "evaluated", {"config": {}})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({1: [STOCK], 2: [*SEARCHES.values(), LOADERS]}, tmp_path_factory)


@pytest.mark.parametrize("layout", SEARCHES)
def test_a_search_tries_the_same_trials_on_every_rank_with_the_numbers_of_one_process(
    layout: str, outcomes: Any
) -> None:
    (stock,) = found(outcomes, 1, STOCK)
    first, second = found(outcomes, 2, SEARCHES[layout])
    assert len(stock["values"]) == 2
    for rank in (first, second):
        assert rank["values"] == pytest.approx(stock["values"], rel=1e-5)
    assert first["best"] == stock["best"]
    assert second["best"] is None, "process 0 has the study"


def test_evaluations_leave_no_loaders_behind(outcomes: Any) -> None:
    for before, after in found(outcomes, 2, LOADERS):
        assert after == before == 1
