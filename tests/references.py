"""What one process computes is computed once per test run, and shared between files and workers.

    expected = shared(("trained", recipe, ranks), lambda: train(recipe, ranks))

The key says everything that the result depends on. Results are pickles in a folder of the run (`conftest.py`).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

__all__ = ["FOLDER", "begin_run", "shared"]

FOLDER = "HF_DIST_REFERENCES"
"""Names the folder; workers of pytest-xdist inherit it."""
Result = TypeVar("Result")


def begin_run() -> None:
    """Make the folder of this run, unless the process that started this one has; it is removed at the end."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="hf_dist-references-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)


def shared(key: Hashable, compute: Callable[[], Result]) -> Result:
    """What `compute()` returned, here or in another file of this run. Do not change it."""
    begin_run()
    known = _known(repr(key))
    if not known:
        place = Path(os.environ[FOLDER], hashlib.sha256(repr(key).encode()).hexdigest())
        if not place.exists():
            _write(compute(), place)
        known.append(pickle.loads(place.read_bytes()))
    return known[0]  # type: ignore[no-any-return]


@functools.cache
def _known(key: str) -> list[object]:
    return []


def _write(result: object, place: Path) -> None:
    """Another worker may write the same at the same time: it becomes visible whole."""
    handle, name = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(result, file)
    os.replace(name, place)
