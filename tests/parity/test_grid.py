"""Every ZeRO stage on every number of ranks equals one process on the joined batch: loss, gradient norm, every weight."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.parity.families import FAMILIES
from tests.parity.train import Case, reference, relative, run_cases

TOLERANCE = 1e-5
STAGES = (0, 1, 2, 3)
PAIRS = tuple(itertools.product((False, True), (False, True)))


def llama_cases() -> list[Case]:
    """The whole grid for one family."""
    flags = itertools.product((1, 3), (False, True), (False, True), (False, True))
    return [
        Case("llama", stage, accumulation, tied, checkpointing, lora)
        for accumulation, tied, checkpointing, lora in flags
        for stage in STAGES
    ]


def family_cases(family: str) -> list[Case]:
    """Accumulation with a short last window, with and without checkpointing, full and LoRA."""
    return [
        Case(family, stage, 3, checkpointing=checkpointing, lora=lora)
        for checkpointing, lora in PAIRS
        for stage in STAGES
    ]


GRID: dict[tuple[str, int], list[Case]] = {("llama", world): llama_cases() for world in (1, 2, 3, 4)}
GRID |= {(family, world): family_cases(family) for family in FAMILIES if family != "llama" for world in (2, 3)}
GRID |= {("hsdp", 4): [Case("llama", stage, acc, shard_size=2) for stage in STAGES for acc in (1, 3)]}
ONCE = [Case("llama", stage, 3, checkpointing=c, lora=lora, once=True) for stage in (2, 3) for c, lora in PAIRS]
GRID |= {("once", world): ONCE for world in (2, 3)}
GRID |= {("once-hsdp", 4): [Case("llama", stage, 3, shard_size=2, once=True) for stage in (2, 3)]}


@functools.cache
def results(name: str, world: int) -> list[list[Any]] | str:
    """One spawn for all cases of a row of the grid; its error if it failed as a whole, so that it is not tried again."""
    try:
        return run_ranks(run_cases, world, (GRID[name, world],), timeout=900)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "world", "index"),
    [
        pytest.param(name, world, i, id=f"{case}-w{world}")
        for (name, world), cases in GRID.items()
        for i, case in enumerate(cases)
    ],
)
def test_equals_one_process_on_the_joined_batch(name: str, world: int, index: int) -> None:
    case = GRID[name, world][index]
    row = results(name, world)
    assert not isinstance(row, str), row
    ranks = [rank[index] for rank in row]
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
    expected = reference(replace(case, stage=0, shard_size=None, once=False))
    for outcome in ranks:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    weights = ranks[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    worst = max(weights, key=lambda n: relative(weights[n], expected["weights"][n]))
    assert relative(weights[worst], expected["weights"][worst]) < TOLERANCE, worst
