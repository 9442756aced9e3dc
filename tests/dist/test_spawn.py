"""Ranks of this machine: what is said when one of them fails."""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import attempts
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


def wait_on_rank_1(rank: int, world: int) -> None:
    """Rank 1 sleeps longer than anybody waits."""
    if rank == 1:
        time.sleep(60)


def test_ranks_that_do_not_end_are_named_with_the_line_where_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not finish within 2 s") as caught:
        run_ranks(wait_on_rank_1, 2, timeout=2)
    assert "[rank 1]" in str(caught.value) and "wait_on_rank_1" in str(caught.value)
    assert "[rank 0]" not in str(caught.value)


def jobs_of_which_one_fails(rank: int, world: int, together: bool) -> list[Any]:
    """The second job fails on rank 1; rank 0 waits inside of it for rank 1, or not."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    attempts.GRACE = timedelta(seconds=1)

    def add(number: int) -> float:
        if number == 1 and rank == 1:
            raise ValueError("job 1 on rank 1")
        total = torch.ones(())
        if number != 1 or together:
            dist.all_reduce(total)
        return total.item()

    return attempts.attempts(rank, world, (functools.partial(add, number) for number in range(3)))


def test_a_job_that_fails_on_one_rank_leaves_the_ranks_in_the_same_job() -> None:
    first, second = run_ranks(jobs_of_which_one_fails, 2, (False,))
    assert first == [2, 1, 2]
    assert second[0] == second[2] == 2 and "ValueError: job 1 on rank 1" in second[1]


def test_a_job_that_fails_on_one_rank_and_waits_on_another_ends_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="ValueError: job 1 on rank 1"):
        run_ranks(jobs_of_which_one_fails, 2, (True,), timeout=60)
