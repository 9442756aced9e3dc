"""What the plan says of a job of 64 ranks, against one rank of it under the fake process group."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.scale.engines import Case, config_of
from tests.scale.measure import measure
from tests.scale.world import forget_launcher

WORLD = 64
LAST = WORLD - 1
# The embedding is large enough to be a unit of its own.
SMALL = Case(width=64, inner=224, layers=2, heads=4, kv_heads=1, vocabulary=1 << 14, seq=32)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (0, config_of(0)),
    "stage1-accumulated": (LAST, config_of(1, gradient_accumulation_steps=3)),
    "stage2-accumulated": (0, config_of(2, gradient_accumulation_steps=3)),
    "stage3": (0, config_of(3)),
    "stage3-last-rank": (LAST, config_of(3)),
    "stage3-accumulated-bf16-wire": (0, config_of(3, gradient_accumulation_steps=2, communication_data_type="bf16")),
    "stage2-reduced-once": (
        LAST,
        config_of(2, gradient_accumulation_steps=3, hf_dist={"reduce_once_per_window": True}),
    ),
    "stage3-reduced-once": (0, config_of(3, gradient_accumulation_steps=3, hf_dist={"reduce_once_per_window": True})),
    "hsdp-accumulated": (LAST, config_of(3, gradient_accumulation_steps=2)),
}
"""Rank and config."""
CASES["hsdp-accumulated"][1]["zero_optimization"]["mics_shard_size"] = 8

# Heads wider and narrower than the rest, so that the peak is at the loss, at the head or in the blocks.
PEAKS = {
    "loss": Case(2048, 7168, 4, 16, 4, 128256, seq=1024),
    "head": Case(2048, 7168, 4, 16, 4, 128256, seq=64),
    "blocks": Case(2048, 7168, 4, 16, 4, 32000, seq=4096),
    "not checkpointed": Case(2048, 7168, 4, 16, 4, 32000, seq=4096, checkpointing=False),
}


def measure_all(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Every case, one rank of 64 each."""
    forget_launcher()
    return {
        name: measure("hf_dist", SMALL, WORLD, config, rank=place, steps=2) for name, (place, config) in CASES.items()
    }


LOSSES: dict[str, Any] = {"chunks": None, "as it is": False}


def measure_peaks(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Every shape under stage 3."""
    forget_launcher()
    return {
        (name, loss): measure("hf_dist", case, WORLD, config_of(3, hf_dist={"tiled_loss": value}), steps=2)
        for name, case in PEAKS.items()
        for loss, value in LOSSES.items()
    }


@functools.cache
def peaks() -> dict[tuple[str, str], dict[str, Any]]:
    """In a process of its own, as `measured`."""
    return run_ranks(measure_peaks, 1)[0]


@functools.cache
def measured() -> dict[str, dict[str, Any]]:
    """In a process of its own: tensors without elements make wrong memories (probes, caches)."""
    return run_ranks(measure_all, 1)[0]


cases = pytest.mark.parametrize("case", CASES)


@cases
def test_collectives_of_a_step_equal_the_plan(case: str) -> None:
    got = measured()[case]
    assert got["traffic"] == got["planned_traffic"]  # what torch was asked for
    assert got["counted"] == got["planned_traffic"]  # what the counter says


@cases
def test_bytes_at_rest_equal_the_plan(case: str) -> None:
    got = measured()[case]
    assert got["resident_said"] == got["planned_resident"]
    # All tensors that are alive, but for buffers and the batch: nothing else is kept than a few numbers.
    assert 0 <= got["resident"] - got["planned_resident"] <= 64


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_is_planned(case: str, loss: str) -> None:
    got = peaks()[case, loss]
    assert got["peak"] == pytest.approx(got["planned_peak"], rel=0.04)
