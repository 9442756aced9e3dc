"""After prepare: every weight, buffer and output equals one process, at every stage and number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.loading.checkpoints import CASES, write
from tests.loading.on_ranks import check_all


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, folder) for name in CASES}


@pytest.mark.parametrize(("world", "stages"), [(1, [0, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])])
def test_prepared_model_equals_one_process(world: int, stages: list[int], paths: dict[str, Path]) -> None:
    for problems in run_ranks(check_all, world, (paths, stages)):
        assert problems == {}
