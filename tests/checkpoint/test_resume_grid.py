"""Saved at world {1,2,3,4} x ZeRO stage {0..3} and copies of shards, loaded at others: states bit for bit, losses to 1e-6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.grid import AFTER, COPIES, Layout, load_all, save_all
from tests.covering import FULL_GRID
from tests.harness import run_ranks

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
Place = tuple[int, Layout]
"""Ranks, and how states lie on them."""
# Every stage is loaded, and each kind of shards saved; more ranks (two that are new), fewer, the same layout bit for bit.
SOME: list[tuple[Place, Place]] = [
    *(((1, 0), (3, 3)), ((2, 2), (2, 2)), ((3, 3), (1, 1)), ((3, 3), (2, 0))),
    # Pieces of shards: from and to other ranks, from copies that have all, the same bit for bit.
    *(((4, "over3"), (2, 2)), ((3, 3), (4, "over2")), ((4, "over3"), (4, "over3")), ((4, "copies"), (4, "over1"))),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Place, Any]]:
    root = tmp_path_factory.mktemp("grid")
    results: dict[Place, Any] = {}
    for world in WORLDS:
        layouts = tuple(dict.fromkeys(layout for (ranks, layout), _ in pairs() if ranks == world))
        for layout, result in run_ranks(save_all, world, (str(root), layouts))[0].items():
            results[world, layout] = result
    return root, results


def pairs() -> list[tuple[Place, Place]]:
    """(saved at, loaded at); all 400 in the full grid."""
    places: list[Place] = [(world, stage) for world in WORLDS for stage in STAGES]
    places += [(4, name) for name in COPIES]
    return [(a, b) for a in places for b in places] if FULL_GRID else SOME


def steps_after(saved_at: Place, loaded_at: Place) -> int:
    """All pairs compare states bit for bit. Equal states train equally, so some pairs train on; in the full grid all."""
    return AFTER if FULL_GRID or saved_at == loaded_at or saved_at[0] != loaded_at[0] else 0


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_is_loaded_by_others(saved: tuple[Path, dict[Place, Any]], world: int) -> None:
    root, expected = saved
    wanted = {(str(root / f"w{w}-z{z}"), to[1]): ((w, z), to) for (w, z), to in pairs() if to[0] == world}
    jobs = [(folder, layout, steps_after(*where)) for (folder, layout), where in wanted.items()]
    ranks = run_ranks(load_all, world, (jobs,), timeout=900)
    loaded = ranks[0]
    assert set(loaded) == set(wanted)
    for key, (digests, losses, _) in loaded.items():
        saved_at, loaded_at = wanted[key]
        where = f"saved at (ranks, layout) {saved_at}, loaded at {loaded_at}"
        want_digests, want_losses = expected[saved_at]
        assert digests == want_digests, where
        new = [rank[key][2] for rank in ranks[saved_at[0] :]]
        assert len(set(new)) == len(new), f"{where}: ranks that are new draw alike"
        assert len(losses) == steps_after(saved_at, loaded_at), where
        if not losses:
            continue
        if saved_at == loaded_at:
            assert losses == want_losses, where
        else:
            assert losses == pytest.approx(want_losses, rel=1e-6), where
