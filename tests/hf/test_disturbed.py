"""Weights that user code reads and writes between steps where they are cut: equal to one process, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hf.disturbed import trained
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.hf.test_trainer import check_equal

LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"zero_optimization": {"stage": 3}},
    "matrices": {**matrices(2), "zero_optimization": {"stage": 1}},
    "stages": {**stages(2), "zero_optimization": {"stage": 3}},
}
TRAINED: dict[str, Job] = {name: ("tests.hf.disturbed:trained", {"config": c}) for name, c in LAYOUTS.items()}
SAID: dict[str, Job] = {name: ("tests.hf.disturbed:said", {"config": LAYOUTS[name]}) for name in ("matrices", "stages")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [*TRAINED.values(), *SAID.values()]}, tmp_path_factory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adversarial_training_equals_the_stock_trainer(layout: str, outcomes: Any, tmp_path: Path) -> None:
    check_equal(found(outcomes, 2, TRAINED[layout])[0], trained(tmp_path, None, 2 if layout == "shards" else 1))


def test_a_slice_is_never_taken_for_the_weight(outcomes: Any) -> None:
    for said in found(outcomes, 2, SAID["matrices"]):
        for (when, _, way), error in said.items():
            assert ("cut by tensor_parallel: this rank has a slice" in error) is (when != "gathered"), (
                when,
                way,
                error,
            )


def test_zeros_are_never_taken_for_the_weight_of_another_stage(outcomes: Any) -> None:
    for rank, said in enumerate(found(outcomes, 2, SAID["stages"])):
        for (when, layer, way), error in said.items():
            other = ("first", "last").index(layer) != rank
            assert (f"is held by pipeline stage {1 - rank}" in error) is other, (when, layer, way, error)
