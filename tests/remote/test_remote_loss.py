"""A divergence computed slice by slice gives the numbers of full logits in one process, and no rank has such logits."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.remote.jobs import STEPS, save_models, with_teacher
from tests.remote.loss_jobs import LONG, distil
from tests.sharding.loop import TOLERANCE, difference

ZERO2, ZERO3, TP2 = (
    {"zero_optimization": {"stage": 2}},
    {"zero_optimization": {"stage": 3}},
    {"tensor_parallel": {"autotp_size": 2}},
)
CASES = [
    (2, ZERO3, 2, TP2, 0.0, 1.0),
    (2, TP2, 1, {}, 0.5, 2.0),
    (1, ZERO2, 2, ZERO3, 1.0, 1.0),
    (2, ZERO2, 3, ZERO3, 0.1, 0.7),
]
"""Ranks and layout of the trainer and of the teacher, beta, temperature."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models")
    save_models(str(made))
    return str(made)


@pytest.mark.parametrize(
    ("ranks", "layout", "served", "teachers", "beta", "temperature"), CASES if FULL_GRID else CASES[:2]
)
def test_equals_full_logits_in_one_process(
    ranks: int,
    layout: dict[str, Any],
    served: int,
    teachers: dict[str, Any],
    beta: float,
    temperature: float,
    folder: str,
) -> None:
    alone = run_ranks(distil, 1, (folder, ZERO2, beta, temperature))[0]
    config = {**layout, **with_teacher(folder, served, teachers)}
    found = run_ranks(distil, ranks + served, (folder, config, beta, temperature))
    for key in ("losses", "norms"):
        assert found[0][key] == pytest.approx(alone[key], rel=1e-5), key
    worst = max(difference(found[0]["weights"][name], value) for name, value in alone["weights"].items())
    assert worst <= TOLERANCE
    trainers = found[:ranks]
    assert max(rank["widest"] for rank in trainers) <= max(1, 4 // 4), "rows of a tensor over the vocabulary"
    config = transformers.AutoConfig.from_pretrained(f"{folder}/teacher")
    askers = [rank for rank in trainers if rank["received"]]
    head = config.vocab_size * config.hidden_size * 4 * len(askers)
    assert sum(rank["received"] for rank in trainers) == STEPS * LONG * config.hidden_size * 4 + head
