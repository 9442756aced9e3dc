"""Local ranks whose parent is killed while they work."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def nap(rank: int, world: int, folder: str) -> None:
    """Say who is here, and go on for longer than any test."""
    (Path(folder) / f"rank{rank}").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    from hf_dist.dist.spawn import run_ranks
    from tests.workers import outliving

    run_ranks(outliving.nap, 2, (sys.argv[1],), preload=("torch",))
