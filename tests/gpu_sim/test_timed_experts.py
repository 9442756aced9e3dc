"""Experts in the timed model: what spreading them hides or saves; all of the table: `python -m tests.gpu_sim.timed_experts`."""

from __future__ import annotations

import functools

import pytest

from tests.covering import FULL_GRID
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.timed_experts import Timed, expected_exchange

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

MODEL, LAYERS, TOKENS = "qwen3-30b", 2 if FULL_GRID else 1, 4096


@functools.cache
def outcome(ep: int) -> Timed:
    (found,) = simulate("tests.gpu_sim.timed_experts:run", MODEL, 8, ep, LAYERS, TOKENS)
    return found  # type: ignore[no-any-return]


def test_on_one_machine_spread_experts_send_less_and_the_step_is_shorter() -> None:
    gathered, spread = outcome(1), outcome(8)
    assert gathered.outcome.hung == spread.outcome.hung == []
    assert spread.outcome.seconds < 0.95 * gathered.outcome.seconds
    assert sum(spread.sent.values()) < 0.5 * sum(gathered.sent.values())


def test_the_host_waits_once_in_a_layer() -> None:
    """For the numbers of rows and pairs; forward again in backward knows them."""
    assert outcome(1).waits == []
    places = [wait.partition(":")[0] for wait in outcome(8).waits]
    assert places == ["hf_dist/parallel/experts/exchange.py"] * LAYERS


def test_the_exchange_takes_what_its_bytes_say() -> None:
    assert outcome(8).sent["all_to_all"] == pytest.approx(expected_exchange(MODEL, 8, LAYERS, TOKENS), rel=0.05)
