"""After prepare: every weight, buffer and output equals one process, at every stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import chosen
from tests.harness import run_ranks
from tests.loading.checkpoints import CASES, write
from tests.loading.on_ranks import check_all


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, folder) for name in CASES}


WORLDS = (1, 2, 3)
GRID = [(name, world, stage) for name in CASES for world in WORLDS for stage in (0, 1, 2, 3)]


def settings(case: tuple[str, int, int]) -> dict[str, Any]:
    """Every checkpoint whole and in shards, on two ranks; every number of ranks with every stage."""
    name, world, stage = case
    return {"read": (name, stage == 3) if world == 2 else None, "layout": (world, stage)}


CHOSEN = chosen([case for case in GRID if case[1] > 1 or case[2] in (0, 3)], settings, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_prepared_model_equals_one_process(world: int, paths: dict[str, Path]) -> None:
    asked = [(name, paths[name], stage) for name, ranks, stage in CHOSEN if ranks == world]
    for problems in run_ranks(check_all, world, (asked,)):
        assert problems == {}
