"""Jobs that tests start print as a user's do: into a file or a pipe, Python keeps back what it prints until there is more."""

import gc
import os

import pytest

from tests.durations import Durations

os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_configure(config: pytest.Config) -> None:
    """Every run says what its files cost."""
    config.pluginmanager.register(Durations(config), "durations")


def pytest_collection_finish() -> None:
    """What is loaded by now stays, and need not be gone through again in each collection of garbage."""
    gc.collect()
    gc.freeze()
