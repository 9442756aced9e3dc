"""Every ZeRO stage on every number of ranks equals one process on the joined batch: loss, gradient norm, every weight."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import FULL_GRID, PAIRS, cells, some_of
from tests.harness import run_ranks
from tests.parity.families import FAMILIES, MIXTURES
from tests.parity.train import Case, reference, relative, run_cases

TOLERANCE = 1e-5
STAGES = (0, 1, 2, 3)
BOTH = (False, True)
SWITCHES = {"checkpointing": BOTH, "lora": BOTH}
OTHERS = tuple(family for family in FAMILIES if family != "llama")
AXES: dict[str, tuple[int, dict[str, tuple[Any, ...]]]] = {
    "llama": (2, {"world": (1, 2, 3, 4), "stage": STAGES, "accumulation": (1, 3), "tied": BOTH, **SWITCHES}),
    "families": (PAIRS, {"family": OTHERS, "stage": STAGES, "world": (2, 3), "accumulation": (3,), **SWITCHES}),
    "hsdp": (2, {"world": (4,), "shard_size": (2,), "stage": (0, 3), "accumulation": (1, 3)}),
    "once": (2, {"once": (True,), "world": (2, 3), "stage": (2, 3), "accumulation": (3,), **SWITCHES}),
    "experts": (
        PAIRS,
        {
            "family": MIXTURES,
            "ep": (2,),
            "world": (2,),
            "stage": STAGES,
            "accumulation": (1, 3),
            "tied": BOTH,
            **SWITCHES,
        },
    ),
    "experts-shared": (
        2,
        {
            "family": ("gpt_oss",),
            "world": (4,),
            "ep": (2, 4),
            "stage": (1, 3) if not FULL_GRID else STAGES,
            "accumulation": (3,),
        },
    ),
    "experts-hsdp": (
        2,
        {"family": ("qwen3_moe",), "world": (4,), "ep": (2,), "shard_size": (2,), "stage": (3,), "accumulation": (3,)},
    ),
    "whole": (
        PAIRS,
        {
            "optimizer": ("muon", "adafactor", "lamb"),
            "world": (2, 3),
            "stage": STAGES,
            "accumulation": (3,),
            "lora": BOTH,
        },
    ),
    "whole-hsdp": (
        2,
        {"optimizer": ("muon", "lamb"), "world": (4,), "shard_size": (2,), "stage": (3,), "accumulation": (3,)},
    ),
    "whole-experts": (
        2,
        {
            "optimizer": ("muon",),
            "family": ("qwen3_moe",),
            "ep": (2,),
            "world": (2,),
            "stage": (1, 3),
            "accumulation": (3,),
        },
    ),
    "over": (
        2,
        {"over": (True,), "world": (4,), "shard_size": (2,), "stage": (1, 2, 3), "accumulation": (1, 3), **SWITCHES},
    ),
    "over-families": (
        PAIRS,
        {
            "family": OTHERS,
            "over": (True,),
            "world": (4,),
            "shard_size": (2,),
            "stage": (1, 2, 3),
            "accumulation": (3,),
            **SWITCHES,
        },
    ),
    "over-whole": (
        2,
        {
            "optimizer": ("muon", "adafactor", "lamb"),
            "over": (True,),
            "world": (4,),
            "shard_size": (2,),
            "stage": (1, 2, 3),
            "accumulation": (3,),
        },
    ),
    "over-six": (  # two copies of three ranks, three of two
        PAIRS,
        {
            "family": FAMILIES,
            "over": (True,),
            "world": (6,),
            "shard_size": (2, 3),
            "stage": (1, 2, 3),
            "accumulation": (1, 3),
            "tied": BOTH,
        },
    ),
    "over-experts": (
        2,
        {
            "family": ("qwen3_moe", "gpt_oss"),
            "over": (True,),
            "world": (4,),
            "ep": (2,),
            "shard_size": (2,),
            "stage": (1, 2, 3),
            "accumulation": (3,),
        },
    ),
    "over-once": (
        2,
        {"over": (True,), "once": (True,), "world": (4,), "shard_size": (2,), "stage": (2, 3), "accumulation": (3,)},
    ),
    "once-hsdp": (2, {"once": (True,), "world": (4,), "shard_size": (2,), "stage": (3,), "accumulation": (3,)}),
}
"""Name of a grid -> (how many axes meet in every combination, fields of a `Case` and their values).

`PAIRS`: the pairs are those of llama's grid, whose stages, ranks and accumulation are the same code for every family.
"""


BY_DEFAULT = (
    "llama-z1-acc3-w1",
    "llama-z3-acc1-tied-checkpointing-lora-w1",
    "llama-z3-acc3-tied-w2",
    "gpt2-z3-acc3-w2",  # products with transposed weights
    "t5-z0-acc3-checkpointing-w2",
    "vit-z2-acc3-checkpointing-w2",
    "gpt_oss-z2-acc1-checkpointing-ep2-w2",
    "deepseek_v3-z0-acc3-tied-lora-ep2-w2",
    "qwen3_moe-z3-acc3-ep2-muon-w2",  # several matrices in one weight
    "llama-z2-acc3-lora-lamb-w2",  # weights that are zero
    "llama-z3-acc3-lora-adafactor-w3",
    "llama-z3-acc3-once-shard2-w4",
    "qwen3_moe-z2-acc3-over-shard2-ep2-w4",
    "llama-z3-acc3-over-shard2-adafactor-w4",
    "bert-z3-acc1-tied-over-shard3-w6",
)
"""Every value of every axis; the other cells run with HF_DIST_FULL_GRID=1. `parallel/tensor/test_grid.py`: Bert, Qwen3."""


def rows(grids: dict[str, tuple[int, dict[str, tuple[Any, ...]]]], names: Collection[str]) -> dict[int, list[Case]]:
    """The cases of all grids by their number of ranks; accumulation of 3 comes with a short last window.

    `names`: of the cases that run by default.
    """
    cases = {
        str(case): case for strength, axes in grids.values() for case in (Case(**c) for c in cells(axes, strength))
    }
    found: dict[int, list[Case]] = {}
    for case in some_of(cases, *names).values():
        found.setdefault(case.world, []).append(case)
    return found


GRID = rows(AXES, BY_DEFAULT)


@functools.cache
def run_row(*cases: Case) -> list[list[Any]] | str:
    """One spawn for all cases of so many ranks; its error if it failed as a whole, so that it is not tried again."""
    try:
        return run_ranks(run_cases, cases[0].world, (list(cases),), timeout=7200 if FULL_GRID else 900)
    except RuntimeError as error:
        return str(error)


def check(cases: list[Case], index: int) -> None:
    """Case `index` of those of so many ranks equals one process on every rank, and all ranks have the same bits."""
    row = run_row(*cases)
    assert not isinstance(row, str), row
    ranks = [rank[index] for rank in row]
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
    one = {
        "stage": 0,
        "world": 1,
        "tp": 1,
        "sequence": False,
        "shard_size": None,
        "once": False,
        "over": False,
        "ep": 1,
    }
    alone = replace(cases[index], checkpointing=False, **one)  # recomputation gives the same bits
    expected = reference(alone)
    for outcome in ranks:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    weights = ranks[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    worst = max(weights, key=lambda n: relative(weights[n], expected["weights"][n]))
    assert relative(weights[worst], expected["weights"][worst]) < TOLERANCE, worst
    for outcome in ranks[1:]:
        assert outcome["bits"] == ranks[0]["bits"]


@pytest.mark.parametrize(
    ("world", "index"),
    [pytest.param(world, i, id=str(case)) for world, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process_on_the_joined_batch(world: int, index: int) -> None:
    check(GRID[world], index)
