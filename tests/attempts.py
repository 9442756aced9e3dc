"""Jobs that ranks do one after the other; a job that fails on one rank does not leave the others in other jobs.

found = attempts(rank, world, [lambda: train(case) for case in cases])
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from hf_dist.dist.patience import crowding
from hf_dist.dist.spawn import FOLDER
from tests.durations import JOB_COSTS

GRACE, LIMIT = timedelta(seconds=30), timedelta(minutes=15)
"""How long a rank waits for the others after a job: where its own failed, and else. Longer on a busy machine."""

Key = TypeVar("Key")
_calls = itertools.count()


def attempts(rank: int, world: int, jobs: Iterable[Callable[[], Any]]) -> list[Any]:
    """What every job returned; a traceback where it raised. Collective: all ranks begin a job together.

    If a job fails on one rank while others wait for that rank inside of it, `RuntimeError` with the traceback: the
    harness then ends all ranks. Without it they would wait until the harness gives up, and nobody would see why.
    """
    store = dist.FileStore(str(Path(os.environ[FOLDER], f"attempts-{next(_calls)}")), world)
    results: list[Any] = []
    for number, job in enumerate(jobs):
        failure, start = "", time.process_time()
        try:
            results.append(job())
        except (Exception, pytest.fail.Exception):  # `pytest.raises` that saw nothing fails with the latter
            failure = traceback.format_exc()
            results.append(failure)
        _note_cost(job, time.process_time() - start)
        store.set(f"{number} {rank}", "done")
        try:
            store.wait([f"{number} {other}" for other in range(world)], (GRACE if failure else LIMIT) * crowding())
        except RuntimeError:  # a FileStore says no more
            raise RuntimeError(failure or f"job {number}: other ranks did not end it within {LIMIT}") from None
    return results


def _note_cost(job: Callable[[], Any], seconds: float) -> None:
    """For `tests/durations.py`, as one test pays for all jobs of a spawn: a line in the file that `JOB_COSTS` names."""
    if JOB_COSTS in os.environ:
        given = (
            [word for word in map(str, job.args) if not word.isdigit()] if isinstance(job, functools.partial) else []
        )
        name = " ".join(given).replace("\n", " ")[:200]
        with contextlib.suppress(OSError), open(os.environ[JOB_COSTS], "a") as file:  # a cost is no reason to fail
            file.write(f"{seconds:.3f}\t{name or getattr(job, '__qualname__', job)}\n")


def attempts_by_name(rank: int, world: int, jobs: Mapping[Key, Callable[[], Any]]) -> dict[Key, Any]:
    """`attempts` of jobs that have names."""
    return dict(zip(jobs, attempts(rank, world, jobs.values()), strict=True))
