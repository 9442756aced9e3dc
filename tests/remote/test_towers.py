"""A tower that trains in another role and another layout gives the numbers of one process that has it inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.remote.tower_jobs import STEPS, save_tower, train, with_tower
from tests.sharding.loop import TOLERANCE, difference

ZERO2, ZERO3 = {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}
TP2, PP2, CP2 = {"tensor_parallel": {"autotp_size": 2}}, {"pipeline": {"stages": 2}}, {"sequence_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "1 beside 1": (1, ZERO2, 1, {}),
    "zero3 of 2 beside tp 2": (2, ZERO3, 2, TP2),
    "zero2 of 2 beside pp 2": (2, ZERO2, 2, PP2),
    "2 beside 3": (2, ZERO3, 3, ZERO3),
    "4 beside 3": (4, ZERO3, 3, ZERO2),
    "1 beside cp 2": (1, ZERO2, 2, CP2),
}
"""Ranks and layout of the trainer, ranks and layout of the tower."""
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "checkpointed": {"checkpointed": True},
    "twice": {"twice": True},
    "no clipping": {"clip": 1e9},
    "bf16": {"half": {"bf16": {"enabled": True}}},
    "fp16, skipped steps": {"half": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}},
}
HALF = ("bf16", "fp16, skipped steps")
"""Compared where both roles have the layout of one process: others round differently."""
FEW = [
    ("1 beside 1", "bf16"),
    ("1 beside 1", HALF[1]),
    ("zero3 of 2 beside tp 2", "accumulation"),
    ("zero2 of 2 beside pp 2", "twice"),
    ("1 beside 1", "checkpointed"),
]
GRID = [(case, how) for case in CASES for how in HOW if case == "1 beside 1" or how not in HALF]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models")
    save_tower(str(made))
    return str(made)


_alone: dict[str, dict[str, Any]] = {}


def alone(folder: str, how: str) -> dict[str, Any]:
    """One process with the tower inside."""
    if how not in _alone:
        _alone[how] = run_ranks(train, 1, (folder, {**ZERO2, **HOW[how].get("half", {})}, HOW[how]))[0]
    return _alone[how]


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    for key in ("weights", "tower"):
        assert found[key].keys() == expected[key].keys()
        worst = max(difference(found[key][name], value) for name, value in expected[key].items())
        assert worst <= TOLERANCE, key


@pytest.mark.parametrize(("case", "how"), GRID if FULL_GRID else FEW)
def test_equals_one_process_with_the_tower_inside(case: str, how: str, folder: str) -> None:
    ranks, layout, served, towers = CASES[case]
    half = HOW[how].get("half", {})
    config = {**layout, **half, **with_tower(folder, served, {**towers, **half})}
    found = run_ranks(train, ranks + served, (folder, config, HOW[how]))
    assert found[ranks:] == [None] * served
    assert len(found[0]["norms"]) == STEPS
    equal(found[0], alone(folder, how))
    assert all(rank["held"] == 0 for rank in found[:ranks]), "no weight of the tower"


def test_resumes_in_another_layout_of_both_roles(folder: str, tmp_path: Path) -> None:
    """Two steps by 2 beside tp 2, three by 1 beside 2: the checkpoint holds the tower with its optimizer."""
    saved = str(tmp_path / "state")
    run_ranks(train, 4, (folder, {**ZERO3, **with_tower(folder, 2, TP2)}, {"saves": saved}))
    found = run_ranks(train, 3, (folder, {**ZERO2, **with_tower(folder, 2, ZERO3)}, {"resumes": saved}))[0]
    expected = alone(folder, "plain")
    equal(found, {**expected, **{key: expected[key][2:] for key in ("losses", "norms")}})


def test_a_backward_has_the_dropout_of_its_forward_whatever_is_called_between(tmp_path: Path) -> None:
    save_tower(str(tmp_path), dropout=0.5)
    config = {**ZERO2, **with_tower(str(tmp_path), 1, {}, functions=["tests.remote.tower_jobs"])}
    found = run_ranks(train, 2, (str(tmp_path), config, {"odd": True}))[0]["odd"]
    assert found["same seed"] == 0 and found["other seed"] != 0 and found["again"] == 0
    # Of the three above, and of the loop's last loss, whose graph is still referred to.
    assert (found["held"], found["left"]) == (4, 1), "forwards whose inputs the role keeps"
    assert found["slope"] == pytest.approx(found["difference"], rel=1e-2)


def test_a_role_that_clips_by_its_own_norm(folder: str) -> None:
    """With a limit that no norm reaches, both kinds of clipping train alike; the norm here is then that of one role."""
    config = {**ZERO2, **with_tower(folder, 1, {}, clip="own")}
    found = run_ranks(train, 2, (folder, config, HOW["no clipping"]))[0]
    expected = alone(folder, "no clipping")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert all(own < joint * 0.999 for own, joint in zip(found["norms"], expected["norms"], strict=True))
