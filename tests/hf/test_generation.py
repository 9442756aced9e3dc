"""Generation equals one process with prompts, lengths and counts that differ by rank; evaluation counts each sample once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.generation_jobs import HOW, SIZES, alone, evaluated, loss_of_rows, seq2seq
from tests.hf.on_ranks import run_jobs

JOBS = "tests.hf.generation_jobs:"
GENERATED = [
    *(("llama", stage, "accelerator") for stage in (0, 1, 2, 3)),
    *(("t5", stage, "accelerator") for stage in (1, 3)),
    ("llama", 3, "initialize"),
]
GENERATED = GENERATED if FULL_GRID else [GENERATED[2], *GENERATED[5:]]  # weights are whole at stages 0 to 2
WAYS: dict[str, dict[str, Any]] = {
    "tokens": {"kind": "tokens"},
    "classes": {"kind": "classes"},
    "accumulated": {"kind": "tokens", "eval_accumulation_steps": 1},
    "gathering": {"kind": "gathering"},
    "by_batch": {"kind": "classes", "batch_eval_metrics": True},
    "stream": {"kind": "stream"},
}
EVALUATED = [
    (way, stage, size) for way in WAYS for stage, size in ((0, 13), (3, 7), (3, 13)) if way != "stream" or size == 7
]
EVALUATED = EVALUATED if FULL_GRID else [EVALUATED[8], EVALUATED[9], EVALUATED[13], EVALUATED[-1]]
BEAMS = [(stage, size, beams) for stage, size, beams in ((1, 7, 1), (3, 13, 2), (3, 7, 1))][:: 1 if FULL_GRID else 3]
WORLDS = (2, 3) if FULL_GRID else (3,)
"""Of the sets. Two ranks evaluate in `test_trainer.py`."""
Job = tuple[str, dict[str, Any]]


def evaluation(way: str, stage: int | None, size: int) -> dict[str, Any]:
    """Arguments of `evaluated`."""
    return {**WAYS[way], "stage": stage, "size": size}


def prediction(stage: int | None, size: int, beams: int) -> dict[str, Any]:
    """Arguments of `seq2seq`."""
    return {"stage": stage, "size": size, "beams": beams}


SETS: list[Job] = [
    *((JOBS + "evaluated", evaluation(*case)) for case in EVALUATED),
    *((JOBS + "seq2seq", prediction(*case)) for case in BEAMS),
]


def generated(family: str, stage: int, loop: str) -> Job:
    """On ranks."""
    return JOBS + "on_ranks", {"family": family, "stage": stage, "loop": loop}


ON_RANKS: list[Job] = [*(generated(*case) for case in GENERATED), *(SETS if 2 in WORLDS else [])]
Outcomes = Callable[..., Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """`outcomes(job, world, rank)`: what a rank returned."""
    found = {
        world: run_ranks(run_jobs, world, (jobs, str(tmp_path_factory.mktemp("ranks"))))
        for world, jobs in ((2, ON_RANKS), (3, SETS))
    }

    def of(job: Job, world: int, rank: int = 0) -> Any:
        result = found[world][rank][(ON_RANKS if world == 2 else SETS).index(job)]
        assert not isinstance(result, str), result
        return result

    return of


@pytest.mark.parametrize(("family", "stage", "loop"), GENERATED, ids=lambda v: str(v))
def test_generate_equals_one_process_with_other_prompts_on_each_rank(
    family: str, stage: int, loop: str, outcomes: Outcomes
) -> None:
    for rank in (0, 1):
        record = outcomes(generated(family, stage, loop), 2, rank)
        for how in HOW:
            expected = alone(family, rank, how)
            assert record["room", how] == expected, how
            assert record["none", how] == expected, how
        assert record["block"] == alone(family, rank, "greedy")


@pytest.mark.parametrize(("family", "stage", "loop"), GENERATED, ids=lambda v: str(v))
def test_generate_gathers_once_per_call_where_the_weights_fit(
    family: str, stage: int, loop: str, outcomes: Outcomes
) -> None:
    record = outcomes(generated(family, stage, loop), 2)
    expected = record["groups"] if stage == 3 else 0
    for how in HOW:
        assert record["room", how, "gathers"] == expected, how
        if stage == 3:
            assert record["none", how, "gathers"] > 2 * expected, how
    assert record["at rest"] == (0 if stage == 3 else record["groups"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", EVALUATED, ids=lambda c: f"{c[0]}-z{c[1]}-{c[2]}rows")
def test_evaluation_is_that_of_one_process(case: Any, world: int, outcomes: Outcomes, tmp_path: Path) -> None:
    way, stage, size = case
    found = outcomes((JOBS + "evaluated", evaluation(way, stage, size)), world)
    expected = evaluated(tmp_path, **evaluation(way, None, size))
    assert found["eval_rows"] == expected["eval_rows"] == size
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["eval_order"] == pytest.approx(expected["eval_order"], rel=1e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", BEAMS, ids=lambda c: f"z{c[0]}-{c[1]}rows-{c[2]}beams")
def test_predict_with_generate_gives_each_row_once(case: Any, world: int, outcomes: Outcomes, tmp_path: Path) -> None:
    stage, size, beams = case
    found = outcomes((JOBS + "seq2seq", prediction(stage, size, beams)), world)
    expected = seq2seq(tmp_path, **prediction(None, size, beams))
    assert found["rows"] == found["labels"] == size
    assert found["tokens"] == expected["tokens"] and len({len(row) for row in found["tokens"]}) > 1
    assert found["loss"] == pytest.approx(loss_of_rows(size), rel=1e-6)


def test_sets_are_no_multiple_of_a_batch() -> None:
    assert all(size % (2 * world) for size in SIZES for world in (1, 2, 3))
