"""Matrices cut between ranks equal one process on the joined batch: the parity grid with `tp`, with and without regions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import FULL_GRID, PAIRS
from tests.parity.test_grid import BOTH, STAGES, SWITCHES, check, rows

CUT: dict[str, tuple[Any, ...]] = {"tp": (2,), "sequence": BOTH, "stage": STAGES}
AXES: dict[str, tuple[int, dict[str, tuple[Any, ...]]]] = {
    "llama": (2, {"world": (2,), **CUT, "accumulation": (1, 3), "tied": BOTH, **SWITCHES}),
    "families": (PAIRS, {"family": ("gpt2", "qwen3", "bert"), "world": (2,), **CUT, **SWITCHES}),
    # Trained biases of row products between regions: one rank adds them, and all have to step them.
    "biases": (1, {"family": ("gpt2", "bert"), "world": (2,), **CUT, "sequence": (True,), "stage": (1, 3)}),
    "experts": (PAIRS, {"family": ("qwen3_moe",), "world": (2,), **CUT, "accumulation": (1, 3), "checkpointing": BOTH}),
    "data": (PAIRS, {"world": (4,), **CUT, "accumulation": (1, 3), "tied": BOTH}),
}
"""As in `tests/parity/test_grid.py`."""
if FULL_GRID:
    AXES["four"] = (2, {"world": (4,), **CUT, "tp": (4,), "accumulation": (1, 3), "tied": BOTH, **SWITCHES})
BY_DEFAULT = (
    "llama-z1-acc1-tied-checkpointing-lora-sequence-tp2-w2",
    "llama-z2-acc3-tp2-w2",
    "llama-z2-acc1-sequence-tp2-w4",
    "gpt2-z1-acc1-sequence-tp2-w2",
    "bert-z3-acc1-sequence-tp2-w2",
    "qwen3-z0-acc1-lora-sequence-tp2-w2",
    "qwen3_moe-z2-acc1-sequence-tp2-w2",
)
"""Every value of every axis."""
GRID = rows(AXES, BY_DEFAULT)


@pytest.mark.parametrize(
    ("world", "index"),
    [pytest.param(world, i, id=str(case)) for world, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process_on_the_joined_batch(world: int, index: int) -> None:
    check(GRID[world], index)
