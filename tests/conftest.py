"""Jobs that tests start print as a user's do: into a file or a pipe, Python keeps back what it prints until there is more."""

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

from hf_dist import log
from tests import garbage, older_versions, references, second_try
from tests.durations import Durations

os.environ.pop("PYTHONUNBUFFERED", None)

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What accelerate and this package set for a process of its own, too; processes that a later file starts would find them."""


def pytest_configure(config: pytest.Config) -> None:
    """Every run says what its files cost; one of `tests.second_try` writes down what failed."""
    references.begin_run()
    with contextlib.suppress(ImportError):  # not on every machine with GPUs
        from hypothesis import settings

        settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault
        settings.load_profile("no deadline")
    if not config.pluginmanager.is_blocked("durations"):
        config.pluginmanager.register(Durations(config), "durations")
    for plugin, ours in (("xdist", "tests.order"), ("timeout", "tests.time_limit")):
        if config.pluginmanager.hasplugin(plugin):  # not on every machine with GPUs
            config.pluginmanager.import_plugin(ours)
    if second_try.VARIABLE in os.environ:
        config.pluginmanager.register(second_try.FailedCases(os.environ[second_try.VARIABLE]), "failed_cases")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What an older library does not have, or is refused with, is not asked of it."""
    for item in items:
        difference = older_versions.difference_of(item.nodeid.removeprefix("tests/"))
        if difference is not None:
            item.add_marker(
                pytest.mark.skip(reason=f"{difference.package} before {difference.before}: {difference.why}")
            )


def pytest_collection_finish() -> None:
    """Everything is loaded."""
    garbage.settle()


@pytest.fixture(autouse=True)
def nothing_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged once per process is logged in each test: another one may have met the same words before."""
    monkeypatch.setattr(log, "_said", set())


@pytest.fixture(autouse=True, scope="module")
def accelerate_starts_anew() -> Iterator[None]:
    """accelerate keeps one state per process: no file finds the precision that another one has chosen, or its launcher."""
    garbage.settle()  # each Trainer of a process collects: not through all that earlier files have loaded
    before = {name: os.environ.get(name) for name in LAUNCHERS}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
