"""What takes a process of its own: a kill in the middle of a swap, memory that is limited, ranks that find no room."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_dist.dist.patience import Patience
from tests import forked, processes
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import ROOT, run_ranks
from tests.memory.offload.test_parity import BF16, offload
from tests.memory.offload.training import differences, make_engine, states, train

ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": ROOT,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # memory that is freed goes back to the system, so that a limit means something
}


def script(name: str, *arguments: object) -> list[str]:
    """The command line of a module beside this one."""
    return [sys.executable, "-m", f"tests.memory.offload.{name}", *map(str, arguments)]


def resume(rank: int, world: int, swap: str, checkpoint: str) -> tuple[Any, list[str]]:
    """The third step after the checkpoint against the third step of a run that was not stopped."""
    engine = make_engine(offload("nvme+nvme", swap), stage=3, seed=5, **BF16)
    engine.load_checkpoint(checkpoint)
    whole = make_engine(offload("nvme+nvme", swap), stage=3, **BF16)
    train(whole, 0, 2)
    same = train(engine, 2, 2) == train(whole, 2, 2)
    return same, differences(states(engine), states(whole))


def test_a_run_killed_in_the_middle_of_a_swap_leaves_no_files_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    swap, checkpoint, told = tmp_path / "swap", tmp_path / "checkpoint", tmp_path / "told"
    job, patience = forked.start(script("killed", swap, checkpoint, told), env=ENVIRONMENT, cwd=ROOT), Patience(120)
    while not told.exists() and job.process.is_alive() and not patience.is_over():
        time.sleep(0.05)
    job.process.kill()
    done = job.end(60)
    assert told.exists() and done.returncode == -signal.SIGKILL, done.stdout
    assert os.listdir(swap) == []
    assert run_ranks(resume, 1, (str(swap), str(checkpoint))) == [(True, [])]


def test_state_on_disk_of_twice_the_memory_limit_trains(tmp_path: Path) -> None:
    run = processes.run(
        script("limited", tmp_path, "nvme", 2, 90 if FULL_GRID else 36), env=ENVIRONMENT, cwd=ROOT, timeout=280
    )
    assert run.returncode == 0, run.stderr[-2000:]
    *losses, end, refused = run.stdout.splitlines()
    assert len(losses) == 2 and float(losses[1].split()[-1]) < float(losses[0].split()[-1])
    words = end.split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert numbers["disk"] >= 2 * numbers["allowed"]
    assert re.search("can't allocate memory|std::bad_alloc", refused), "the limit did not hold"


@FULL_GRID_ONLY  # the limit is seen to hold at the end of the run above
def test_without_offload_the_same_limit_ends_the_run(tmp_path: Path) -> None:
    run = processes.run(script("limited", tmp_path, "none", 2, 90), env=ENVIRONMENT, cwd=ROOT, timeout=280)
    # torch's allocator, or C++ for something small
    assert run.returncode != 0 and re.search("can't allocate memory|std::bad_alloc", run.stderr)


def without_room(rank: int, world: int, folder: str) -> str:
    """Rank 1's disk is full, or its folder a file: what every rank is told."""
    from hf_dist.memory.offload import storage

    if rank == 1:
        storage.free_nbytes = lambda _: 1000
    with pytest.raises(Exception) as caught:
        make_engine(offload("nvme", folder), stage=2)
    return f"{type(caught.value).__name__}: {caught.value}"


def without_room_for_states(rank: int, world: int, folder: str) -> str:
    """There is room for the master weights, 55 kB on both ranks together, and not for AdamW's states as well."""
    from hf_dist.memory.offload import storage

    storage.free_nbytes = lambda _: 100_000
    with pytest.raises(Exception) as caught:
        make_engine(offload("nvme", folder), stage=2)
    make_engine(offload("nvme", folder), stage=2, optimizer="plain_sgd")  # which keeps nothing
    return f"{type(caught.value).__name__}: {caught.value}"


def without_folder(rank: int, world: int, folder: str) -> str:
    """One rank may not write its folder."""
    from hf_dist.memory.offload import nvme

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    if rank == 1:
        nvme.tempfile.mkstemp = refuse  # type: ignore[assignment]
    with pytest.raises(Exception) as caught:
        make_engine(offload("nvme", folder), stage=2)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (without_room, "has room for"),
        (without_room_for_states, "has room for"),
        (without_folder, "cannot be written"),
    ],
)
def test_every_rank_is_told_before_anything_is_sharded(job: Any, words: str, tmp_path: Path) -> None:
    told = run_ranks(job, 2, (str(tmp_path),), timeout=120)
    assert told[0] == told[1]
    assert told[0].startswith("ConfigError: zero_optimization.offload_optimizer.nvme_path: ") and words in told[0]
