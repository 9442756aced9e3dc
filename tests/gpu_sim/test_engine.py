"""Training on a simulated GPU, by the line: races, early frees, waits of the host, communicators that come too late."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID, Cell, cells
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.training import Report, Setting

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

AXES: dict[str, Any] = {
    "stage": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "checkpointing": ("none", "blocks", "host"),
    "replicas": (1, 2),
    "over": (False, True),
    "offload": ("none", "optimizer", "both"),
    "in_backward": (False, True),
    "budget": (False, True),
    "lora": (False, True),
    "dtype": ("bf16", "fp16"),
    "between": ("nothing", "evaluation", "generation"),
    "wires": ("none", "all", "hops"),
}


def exists(cell: Cell) -> bool:
    """What the configuration allows."""
    least = {"optimizer": 1, "both": 3}.get(cell["offload"], 0)
    copies = 0 if cell["replicas"] == 1 else 1 if cell["over"] else 3
    if cell["stage"] < max(least, copies, 3 if cell["budget"] else 0) or (cell["over"] and cell["replicas"] == 1):
        return False
    return not (cell["in_backward"] and cell["dtype"] == "fp16")


EVERY = cells(AXES, allowed=exists, full=True)
FEW: list[Cell] = [
    dict(
        stage=2, accumulation=2, checkpointing="none", replicas=1, over=False, offload="optimizer", in_backward=False,
        budget=False, lora=False, dtype="fp16", between="generation", wires="hops",
    ),
    dict(
        stage=3, accumulation=1, checkpointing="host", replicas=2, over=False, offload="both", in_backward=True, budget=True,
        lora=True, dtype="bf16", between="evaluation", wires="none",
    ),
    dict(
        stage=2, accumulation=2, checkpointing="none", replicas=2, over=True, offload="none", in_backward=False,
        budget=False, lora=False, dtype="bf16", between="nothing", wires="all",
    ),
    dict(
        stage=3, accumulation=1, checkpointing="none", replicas=2, over=True, offload="both", in_backward=False,
        budget=False, lora=False, dtype="bf16", between="evaluation", wires="none",
    ),
]  # fmt: skip
"""What each axis does beyond the plain steps of `test_trainers.py` (stages 0 and 1) and `test_sequences.py` (stage 3)."""
GRID = EVERY if FULL_GRID else [cell for cell in EVERY if cell in FEW]


def setting(cell: Cell) -> Setting:
    return Setting(**cell, clipping=0.0 if cell["in_backward"] else 1.0)


def name(cell: Cell) -> str:
    on = [
        f"{axis}-{value}"
        for axis, value in cell.items()
        if value is True or value not in (False, "none", "nothing", 1) or axis == "stage"
    ]
    return "-".join(on)


@functools.cache
def reported(chosen: Setting) -> Report:
    (found,) = simulate("tests.gpu_sim.training:train", chosen)
    return found  # type: ignore[no-any-return]


grid = pytest.mark.parametrize("cell", GRID, ids=name)


@grid
def test_nothing_is_read_too_early_or_freed_too_early(cell: Cell) -> None:
    found = reported(setting(cell))
    assert found.kernels > 100, "nothing was recorded"
    assert found.faults == []


ON_HOST = {
    "wait_host": "gradients that are stepped there have arrived",
    "_is_skipped": "the norm of what is stepped there, or of what the loss scale depends on",
    "__torch_dispatch__": "the factor of clipping",
    "wait": "the gradients of a group that is stepped in backward",
    "_take_staging": "a buffer is free again",
    "on_device": "the sum so far, to be combined over the replicas",
}
"""Functions that may wait for what their step has begun where the host steps the optimizer, and what for."""


@grid
def test_the_host_waits_for_nothing_unless_it_steps_the_optimizer_or_moves_the_loss_scale(cell: Cell) -> None:
    waits = [
        wait for wait in reported(setting(cell)).waits if " at transformers/" not in wait
    ]  # its `generate` asks much
    allowed = set[str]()
    if cell["dtype"] == "fp16":
        allowed = {"_is_skipped"}
    if cell["offload"] != "none":
        allowed = {*ON_HOST}
    assert [wait for wait in waits if wait.rpartition(" ")[2] not in allowed] == []


@grid
def test_no_communicator_is_first_used_in_a_step(cell: Cell) -> None:
    assert reported(setting(cell)).late == []
