"""Run a function on several ranks (gloo, this machine) and bring back what each returned.

    results = run_ranks(fn, world=3, args=(cases,))     # results[rank]

`fn(rank, world, *args)` must live in an importable module. A spawn costs a fraction of a second (`hf_dist/dist/spawn.py`);
still, one spawn per file and many cases inside is the habit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hf_dist.dist import spawn

__all__ = ["PRELOAD", "ROOT", "run_ranks"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRELOAD = ["torch", "transformers", "torch.distributed", "tests.preload"]


def run_ranks(fn: Callable[..., Any], world: int, args: Iterable[Any] = (), timeout: float = 300) -> list[Any]:
    """What `fn(rank, world, *args)` returned, by rank. Raises RuntimeError with the traceback of the first failing rank."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    return spawn.run_ranks(fn, world, args, timeout, PRELOAD)
