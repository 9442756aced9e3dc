"""A model of images and text in the Trainer, with its vision tower in another role, frozen or trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.remote.image_jobs import STEPS, save_models, train
from tests.sharding.loop import TOLERANCE, difference

ZERO3, TP2 = {"zero_optimization": {"stage": 3}}, {"tensor_parallel": {"autotp_size": 2}}
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}}}
CASES = [
    (2, ZERO3, 2, TP2, "frozen"),
    (1, {}, 2, ZERO3, "trained"),
    (2, ZERO3, 1, {}, "trained"),
    (1, {}, 3, ZERO3, "frozen"),
    (2, ZERO3, 1, {}, "frozen, adapters"),
]


@pytest.mark.parametrize(("ranks", "layout", "served", "towers", "kind"), CASES if FULL_GRID else CASES[:2])
def test_equals_the_trainer_with_the_whole_model(
    ranks: int, layout: dict[str, Any], served: int, towers: dict[str, Any], kind: str, tmp_path: Any
) -> None:
    trains, adapters = kind == "trained", "adapters" in kind
    folder = str(tmp_path)
    save_models(folder)
    expected = run_ranks(train, 1, (folder, {}, trains, adapters))[0]
    tower = {"ranks": served, "model": f"{folder}/tower", "config": {**towers, **(OPTIMIZER if trains else {})}}
    config = {**layout, "hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "tower": tower}}}
    found = run_ranks(train, ranks + served, (folder, config, trains, adapters))
    assert found[ranks:] == [None] * served and len(expected["losses"]) == STEPS
    for key in ("losses", "norms"):
        assert found[0][key] == pytest.approx(expected[key], rel=1e-5), key
    assert found[0]["weights"].keys() == expected["weights"].keys()
    worst = max(difference(found[0]["weights"][name], value) for name, value in expected["weights"].items())
    assert worst <= TOLERANCE
    assert all(rank["held"] == 0 for rank in found[:ranks])
    assert found[0]["tower saved"] == trains
