"""When garbage is collected is nothing that a test may depend on: `HF_DIST_TEST_GC=off` or `often` moves the moment.

    HF_DIST_TEST_GC=off bash tests/run.sh -k lifetimes

In ranks, too. With neither, Python decides, after what was loaded before the tests has been taken out of its sight.
"""

from __future__ import annotations

import gc
import os

VARIABLE = "HF_DIST_TEST_GC"
OFTEN = 20
"""New objects between two collections of the youngest; Python's default is 700."""


def settle() -> None:
    """What is loaded by now stays, and need not be gone through again in each collection; then as the variable says."""
    gc.collect()
    gc.freeze()
    how = os.environ.get(VARIABLE, "")
    if how == "off":
        gc.disable()
    elif how == "often":
        gc.set_threshold(OFTEN, 2, 2)
    elif how:
        raise ValueError(f"{VARIABLE}={how!r}: off, or often")
