"""Several ranks that load a model: what only some of them did, what differs, what is missing; and the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.loading import jobs
from tests.loading.checkpoints import write

ON_TWO = [
    "read_on_one_rank", "changed_model", "different_files", "vanished_on_one_rank", "wrong_bytes_on_one_rank",
    "wrong_replicas", "poisoned_memory", "trainer",
]  # fmt: skip


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    assert run_ranks(jobs.run, 2, ([name], path)) == [{}, {}]


def test_shards_among_half_of_the_ranks(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    assert run_ranks(jobs.run, 4, (["hybrid_shards"], path)) == [{}] * 4
