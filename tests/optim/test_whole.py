"""Optimizers that must see whole tensors: bits, bytes, skipped steps, unused parameters, offload, and resuming elsewhere.

With one process on other rows they are compared in `parity/test_grid.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.optim.whole_jobs import RESUMED, STEPS, bits, on_two_ranks, resumed, torch_muon
from tests.parity.families import make_batches, make_model, summed_loss
from tests.parity.optimizers import SECTIONS

STAGES = (0, 1, 2, 3) if FULL_GRID else (0, 3)
WORLDS = (1, 2) if FULL_GRID else (2,)
LAYOUTS = ((3, 1), (1, 0)) if FULL_GRID else ((3, 1),)
"""Ranks and stage onto which the states of two ranks at stage 3 are loaded."""


def one_process() -> dict[str, torch.Tensor]:
    model = make_model("llama")
    optimizer = torch_muon(model)
    for batch in make_batches("llama", STEPS):
        total, items = summed_loss(model, {k: v[:2] for k, v in batch.items()})
        optimizer.zero_grad()
        (total / items).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `two` saves."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[Any]]:
    """What each of two ranks found, by job."""
    ranks = run_ranks(on_two_ranks, 2, (STAGES, str(folder)))
    return {job: [rank[job] for rank in ranks] for job in ranks[0]}


@pytest.mark.parametrize("world", WORLDS)
def test_muon_has_torchs_bits_where_gradients_are_equal_and_sends_what_the_formula_says(world: int, two: Any) -> None:
    expected = one_process()
    ranks = two["bits"] if world == 2 else run_ranks(bits, world, (STAGES,))
    for outcomes in ranks:
        for stage, (weights, nbytes, count, formula, rounds) in zip(STAGES, outcomes, strict=True):
            assert all(torch.equal(weights[n], v) for n, v in expected.items()), f"stage {stage}"
            assert rounds > 1, "more than one round is under way"
            if world > 1:
                assert nbytes == formula and count == STEPS * rounds * (1 if stage == 0 else 2), f"stage {stage}"


def test_states_of_whole_tensors_are_saved_by_name_and_loaded_at_another_layout(two: Any, folder: Path) -> None:
    written = two["saved"][0]
    for world, stage in LAYOUTS:
        for rank in run_ranks(resumed, world, (str(folder), stage)):
            for kind in RESUMED:
                assert rank[kind][0] == written[kind][0], f"{kind}: states on {world} ranks"
                assert rank[kind][1] == pytest.approx(written[kind][1], rel=1e-5), f"{kind} on {world} ranks"


def test_the_plan_of_an_optimizer_object_is_what_rests(two: Any) -> None:
    for rank in two["planned"]:
        for kind, (plan, held, known) in rank.items():
            assert known == (not kind.startswith("asking")), kind
            assert (plan == held) == known, f"{kind}: {plan} planned, {held} there"


def test_skipped_steps_unused_parameters_and_offload(two: Any) -> None:
    for rank in two["odd"]:
        for name in SECTIONS:
            assert rank[f"{name}-overflow"] == (1, True, True)
            still, moved = rank[f"{name}-unused-False"], rank[f"{name}-unused-True"]
            assert still == {"used.weight": False, "used.bias": False, "idle.weight": True, "idle.bias": True}, name
            assert not any(moved.values()), name
        assert rank["offload"]
