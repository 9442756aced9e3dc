"""A teacher in another role and another layout gives a student the numbers of one process that has both."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.remote.jobs import ROWS, STEPS, distil, save_models, with_teacher
from tests.sharding.loop import TOLERANCE, difference

ZERO2, ZERO3 = {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}
TP2, PP2, CP2 = {"tensor_parallel": {"autotp_size": 2}}, {"pipeline": {"stages": 2}}, {"sequence_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "zero3 of 2 beside tp 2": (2, ZERO3, 2, TP2),
    "zero2 of 2 beside pp 2": (2, ZERO2, 2, PP2),
    "1 beside 3": (1, ZERO2, 3, ZERO3),
    "tp 2 beside 1": (2, TP2, 1, {}),
    "4 beside 2": (4, ZERO3, 2, ZERO3),
    "4 beside 3": (4, ZERO3, 3, ZERO3),
    "2 beside cp 2": (2, ZERO3, 2, CP2),
    "cp 2 beside 2": (2, CP2, 2, ZERO3),
}
"""Ranks and layout of the trainer, ranks and layout of the teacher."""
FEW = ("zero3 of 2 beside tp 2", "zero2 of 2 beside pp 2", "1 beside 3", "tp 2 beside 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models")
    save_models(str(made))
    return str(made)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    """One process with both models."""
    found: dict[str, Any] = run_ranks(distil, 1, (folder, ZERO2))[0]
    return found


@pytest.mark.parametrize("case", CASES if FULL_GRID else FEW)
def test_equals_one_process_with_both_models(case: str, folder: str, alone: dict[str, Any]) -> None:
    ranks, layout, served, teachers = CASES[case]
    found = run_ranks(distil, ranks + served, (folder, {**layout, **with_teacher(folder, served, teachers)}))
    assert found[ranks:] == [None] * served
    for key in ("losses", "norms"):
        assert found[0][key] == pytest.approx(alone[key], rel=1e-5), key
    assert len(alone["losses"]) == STEPS
    worst = max(difference(found[0]["weights"][name], value) for name, value in alone["weights"].items())
    assert worst <= TOLERANCE
    for rank in found[:ranks]:
        assert rank["held"] == 0, "no weight of the teacher"
    # Rows go there as two tensors of int64, and come back as logits in fp32.
    vocabulary, tokens = transformers.AutoConfig.from_pretrained(f"{folder}/teacher").vocab_size, STEPS * ROWS * 6
    assert sum(rank["sent"] for rank in found[:ranks]) == tokens * 16
    assert sum(rank["received"] for rank in found[:ranks]) == tokens * vocabulary * 4
