"""Ranks of this machine: what is said when one of them fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import run_ranks


def fail_on_rank_1(rank: int, world: int, folder: str) -> None:
    """All meet, then rank 1 fails and rank 0 is done; what each prints goes to a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    if rank == 1:
        raise ValueError("the only traceback")


def test_ranks_that_are_done_say_nothing_about_a_peer_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the only traceback"):
        run_ranks(fail_on_rank_1, 2, (str(tmp_path),))
    assert "Traceback" not in (tmp_path / "0").read_text()
