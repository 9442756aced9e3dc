"""The Trainer in one process with a GPU, and checkpoints in the background, on a simulated GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.training import Report

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))


@functools.cache
def reported(job: str, *args: Any) -> Report:
    return simulate(f"tests.gpu_sim.trainers:{job}", *args)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 3] if FULL_GRID else [0])
def test_the_trainer_without_a_launcher_trains_on_the_gpu_and_the_host_waits_for_nothing(stage: int) -> None:
    found = reported("train", stage)
    assert found.kernels > 100
    assert found.faults == []
    assert found.waits == []


@pytest.mark.parametrize("stage", [1, 3] if FULL_GRID else [1])
def test_a_checkpoint_in_the_background_reads_what_has_arrived(stage: int) -> None:
    assert reported("save", stage).faults == []


def test_one_that_begins_to_write_at_once_is_found() -> None:
    found = reported("save", 3, False)
    assert any(fault.startswith("race: writing a checkpoint") for fault in found.faults), found.faults
