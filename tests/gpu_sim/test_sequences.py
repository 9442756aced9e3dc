"""Split sequences on a simulated GPU: exchanges under streams, and the kernels of CUDA that a ring calls."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.gpu_sim import library
from tests.gpu_sim.sequences import LAYERS
from tests.gpu_sim.server import simulate
from tests.gpu_sim.training import Report

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

FLASH, EFFICIENT = "_flash_attention", "_scaled_dot_product_efficient_attention"
CASES: list[tuple[Any, str, str]] = [
    *((exchange, "bf16", "llama") for exchange in ("ulysses", "gather", "ring")),
    ((2, 2), "bf16", "llama"),
    ("ring", "fp32", "llama"),
    ("ulysses", "bf16", "lfm2"),
    ("ring", "bf16", "lfm2"),
]
if not FULL_GRID:  # every exchange, and both families
    CASES = [("gather", "bf16", "llama"), ("ring", "bf16", "llama"), ("ulysses", "bf16", "lfm2")]


@functools.cache
def reported(exchange: Any, dtype: str, family: str, rows: str = "plain") -> tuple[Report, Counter[str]]:
    given = list(exchange) if isinstance(exchange, tuple) else exchange
    return simulate("tests.gpu_sim.sequences:train", given, dtype, family, rows)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("exchange", "dtype", "family"), CASES)
def test_a_step_has_no_races_and_the_host_waits_for_nothing(exchange: Any, dtype: str, family: str) -> None:
    found, _ = reported(exchange, dtype, family)
    assert found.kernels > 100
    assert found.faults == []
    assert found.waits == []


@pytest.mark.parametrize(("dtype", "kernel"), [("bf16", FLASH), *([("fp32", EFFICIENT)] if FULL_GRID else [])])
def test_a_ring_calls_the_kernels_of_cuda_for_each_pair(dtype: str, kernel: str) -> None:
    """Rank 0 of 4 has the first and the last chunk: its pairs with chunks that are not later, 9 of them."""
    layers, pairs = LAYERS, 9
    _, launched = reported("ring", dtype, "llama")
    own = {name: count for name, count in launched.items() if "attention" in name}
    forward = "_flash_attention_forward" if kernel == FLASH else EFFICIENT
    assert own == {forward: 2 * layers * pairs, f"{kernel}_backward": layers * pairs}  # forward again in backward


@pytest.mark.parametrize(
    ("rows", "waits"),
    [
        ("packed", ["ring_plan.py _borders", "ring_plan.py __init__"]),
        ("padded", ["inputs.py _filled", "ring_plan.py _borders", "ring_plan.py __init__"]),
    ],
)
def test_a_ring_asks_for_borders_and_areas_once_a_forward(rows: str, waits: list[str]) -> None:
    """And for padding. Nothing in its layers, and nothing when blocks run again."""
    found, launched = reported("ring", "bf16", "llama", rows)
    assert found.faults == []
    asked = [wait.rpartition("hf_dist/parallel/sequence/")[2] for wait in found.waits]
    assert [f"{place.partition(':')[0]} {place.rpartition(' ')[2]}" for place in asked] == waits, found.waits
    assert launched["_flash_attention_forward"] == 2 * launched["_flash_attention_backward"] > 0
