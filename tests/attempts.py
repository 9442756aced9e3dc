"""Jobs that ranks do one after the other; a job that fails on one rank does not leave the others in other jobs.

found = attempts(rank, world, [lambda: train(case) for case in cases])
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

GRACE, LIMIT = timedelta(seconds=30), timedelta(minutes=15)
"""How long a rank waits for the others after a job: where its own failed, and else."""


def attempts(rank: int, world: int, jobs: Iterable[Callable[[], Any]]) -> list[Any]:
    """What every job returned; a traceback where it raised. Collective: all ranks begin a job together.

    If a job fails on one rank while others wait for that rank inside of it, `RuntimeError` with the traceback: the
    harness then ends all ranks. Without it they would wait until the harness gives up, and nobody would see why.
    """
    name = f"hf_dist-attempts-{os.getppid()}-{os.environ['MASTER_PORT']}"
    store = dist.FileStore(str(Path(tempfile.gettempdir(), name)), world)
    results: list[Any] = []
    for number, job in enumerate(jobs):
        failure = ""
        try:
            results.append(job())
        except Exception:
            failure = traceback.format_exc()
            results.append(failure)
        store.set(f"{number} {rank}", "done")
        try:
            store.wait([f"{number} {other}" for other in range(world)], GRACE if failure else LIMIT)
        except RuntimeError:  # a FileStore says no more
            raise RuntimeError(failure or f"job {number}: other ranks did not end it within {LIMIT}") from None
    return results
