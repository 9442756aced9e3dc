"""Communication that shows in a step of the timed model; all of the table: `python -m tests.gpu_sim.timed`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import FULL_GRID, FULL_GRID_ONLY, some_of
from tests.gpu_sim import costs, library
from tests.gpu_sim.replay import Outcome
from tests.gpu_sim.server import simulate
from tests.gpu_sim.timed import LAYERS
from tests.gpu_sim.timed_search import looked_up
from tests.gpu_sim.trace import COMPUTE

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

CASE = replace(LAYERS, layers=4, vocabulary=32000)
LIMITS = some_of({"zero0": 1.06, "zero1": 1.04, "zero3": 1.05}, "zero3")  # it gathers, too
"""Of step / compute alone with the shipped configs: the ends, which nothing hides, are a larger part of few layers."""


@functools.cache
def outcome(engine: str, overlaps: bool = True) -> Outcome:
    zero: dict[str, Any] = {} if overlaps else {"overlap_comm": False}
    (found,) = simulate("tests.gpu_sim.timed:run", engine, 8, costs.NETWORK, CASE, zero)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", LIMITS)
def test_a_step_takes_little_longer_than_its_computation(engine: str) -> None:
    assert outcome(engine).hung == []
    assert outcome(engine).ratio < LIMITS[engine]


@pytest.mark.parametrize("engine", LIMITS)
def test_what_shows_is_what_layouts_are_chosen_by(engine: str) -> None:
    found, run = looked_up(int(engine[-1]), costs.NETWORK, CASE), outcome(engine)
    assert found.exposed == pytest.approx(run.seconds - run.busy[COMPUTE], rel=0.3)


WIRES = {"weights": "int8", "gradients": "int4"}
ENCODED = some_of({"zero0": (50e9, 1.3), "zero3": (50e9, 1.15), "zero0 near": (costs.NETWORK, 1.0)}, "zero3")
"""Engine -> bytes per second, and the most that a step may take: of the computation that it has without codecs; near: of the
whole step without codecs."""


@functools.cache
def encoded(stage: int, network: float) -> Outcome:
    (found,) = simulate("tests.gpu_sim.timed:run", f"zero{stage}", 8, network, CASE, {}, WIRES)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ENCODED)
def test_encoded_messages_hide_behind_the_computation_on_slow_links(name: str) -> None:
    network, most = ENCODED[name]
    found, plain = encoded(int(name[4]), network), outcome(name[:5])
    assert found.hung == []
    assert found.seconds < most * (plain.seconds if "near" in name else plain.busy[COMPUTE])


def test_layouts_are_chosen_by_the_bytes_of_encoded_messages() -> None:
    found, run = looked_up(3, 50e9, CASE, WIRES), encoded(3, 50e9)
    assert found.exposed == pytest.approx(run.seconds - run.busy[COMPUTE], rel=0.3)


FOUR_OF_EIGHT = (4, 8, 8 if FULL_GRID else 4)
"""Machines, their ranks, microbatches."""
BETWEEN = (50e9, 50e9 / 8) if FULL_GRID else (50e9,)
"""Of a rank: a link of 50 GB/s for each of them, or one that a machine's ranks share."""


@pytest.mark.parametrize(("stage", "between"), [(s, b) for s in some_of({1: 0, 2: 0, 3: 0}, 3) for b in BETWEEN])
def test_the_optimizer_over_all_machines_hides_what_crosses_between_them(stage: int, between: float) -> None:
    case = LAYERS if FULL_GRID else replace(CASE, layers=2)
    (found,) = simulate("tests.gpu_sim.timed_copies:run", "over", stage, FOUR_OF_EIGHT, between, case)
    assert found.hung == []
    assert found.ratio < 1.10


@FULL_GRID_ONLY
def test_reductions_that_are_waited_for_at_once_show() -> None:
    assert outcome("zero0").seconds < 0.92 * outcome("zero0", overlaps=False).seconds
