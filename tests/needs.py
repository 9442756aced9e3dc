"""Files of tests that need a package which not every environment has."""

from __future__ import annotations

import importlib.util

import pytest


def package(name: str, reason: str) -> None:
    """Skip the calling file where the package is missing. Unlike `pytest.importorskip` it loads nothing.

    Every worker reads every file, and `lightning` takes two seconds to load: only the worker that runs its tests does.
    """
    if not has(name):
        pytest.skip(f"needs {name}: {reason}", allow_module_level=True)


def has(name: str) -> bool:
    """Whether the package is installed; loads nothing."""
    return importlib.util.find_spec(name) is not None
