"""Saved at world {1,2,3,4} x ZeRO stage {0..3}, loaded at every other pair: states bit for bit, losses to 1e-6."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.grid import AFTER, load_all, save_all
from tests.harness import run_ranks

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, int], Any]]:
    root = tmp_path_factory.mktemp("grid")
    results = {}
    for world in WORLDS:
        for stage, result in run_ranks(save_all, world, (str(root), STAGES))[0].items():
            results[world, stage] = result
    return root, results


def steps_after(saved_at: tuple[int, int], loaded_at: tuple[int, int]) -> int:
    """All pairs compare states bit for bit. Equal states train equally, so one pair in four trains on: every source layout
    and every target layout is in four of them, and each layout with itself. HF_DIST_FULL_GRID=1 trains on in all 256."""
    chosen = (sum(saved_at) + sum(loaded_at)) % 4 == 0 or saved_at == loaded_at
    return AFTER if chosen or os.environ.get("HF_DIST_FULL_GRID") else 0


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_loads_every_other(saved: tuple[Path, dict[tuple[int, int], Any]], world: int) -> None:
    root, expected = saved
    pairs = {
        (str(root / f"w{w}-z{z}"), stage): ((w, z), (world, stage)) for w in WORLDS for z in STAGES for stage in STAGES
    }
    jobs = [(folder, stage, steps_after(*where)) for (folder, stage), where in pairs.items()]
    loaded = run_ranks(load_all, world, (jobs,), timeout=900)[0]
    assert set(loaded) == set(pairs)
    for key, (digests, losses) in loaded.items():
        saved_at, loaded_at = pairs[key]
        where = f"saved at (world, stage) {saved_at}, loaded at {loaded_at}"
        want_digests, want_losses = expected[saved_at]
        assert digests == want_digests, where
        if saved_at == loaded_at:
            assert losses == want_losses, where
        elif losses:
            assert losses == pytest.approx(want_losses, rel=1e-6), where
