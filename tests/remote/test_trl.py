"""TRL's trainers, unmodified, with their teacher or reference in another role: the numbers of one beside the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.ecosystem.tiny import save_models
from tests.harness import run_ranks
from tests.sharding.loop import TOLERANCE, difference

pytest.importorskip("trl", reason="TRL needs Python 3.11")
from tests.ecosystem.trl_trainers import save_teacher
from tests.remote.trl_jobs import TEACHERS, train, with_teacher

ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}
CASES = [(name, layout) for name in TEACHERS for layout in ({"tensor_parallel": {"autotp_size": 2}}, ZERO3)]
FEW = [CASES[0], CASES[5]]
"""A trainer that reads hidden states and the head, and one that reads logits."""


@pytest.mark.parametrize(("name", "layout"), CASES if FULL_GRID else FEW, ids=str)
def test_equals_the_same_trainer_with_the_model_beside(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    save_models(tmp_path)
    save_teacher(tmp_path)
    root = str(tmp_path)
    expected = run_ranks(train, 2, (name, root, ZERO3, root + "/beside"))[0]
    found = run_ranks(train, 4, (name, root, {**ZERO3, **with_teacher(root, 2, layout)}, root + "/elsewhere"))
    assert found[2:] == [None, None]
    for key in ("losses", "norms"):
        assert found[0][key] == pytest.approx(expected[key], rel=1e-5), key
    assert min(expected["norms"]) > 0
    worst = max(difference(found[0]["weights"][name], value) for name, value in expected["weights"].items())
    assert worst <= TOLERANCE
