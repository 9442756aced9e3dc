"""The guard on what test files cost: a file above the limit fails a run that was green, with one worker and with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import tree_seconds
from tests.harness import ROOT

PLUGIN = """
from tests import durations

import itertools
import os

more = itertools.count(0, 1000 if {two_workers} and "PYTEST_XDIST_WORKER" not in os.environ else 0)
durations.spent = 0.0
durations.tree_seconds = lambda root: durations.spent + next(more)
durations.slowness = lambda: 1.0


def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))
"""
SPEND = "from tests import durations\n\ndef test_it():\n    durations.spent += {}\n"


@pytest.mark.parametrize(
    "workers", [(), ("-p", "xdist", "-n", "2", "--dist", "loadfile")], ids=["one process", "two workers"]
)
def test_a_file_that_is_too_dear_fails_the_run_and_is_named(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN.format(two_workers=bool(workers)))
    for name, seconds in (("cheap", 59), ("noticed", 61), ("dear", 181)):
        (tmp_path / f"test_{name}.py").write_text(SPEND.format(seconds))
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_DIST_KILLS", "HF_DIST_FULL_GRID")}
    environment |= {"PYTHONPATH": ROOT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path), *more]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    whole = run()
    assert whole.returncode == 1, whole.stdout
    told = [line for line in whole.stdout.splitlines() if "TOO LONG" in line]
    assert len(told) == 2, whole.stdout
    assert any("FAILED" in line and "test_dear.py" in line for line in told)
    assert any("FAILED" not in line and "test_noticed.py" in line for line in told)
    assert "test_cheap.py" in whole.stdout
    if not workers:
        rest = run("--deselect", "test_dear.py::test_it")
        assert rest.returncode == 0, rest.stdout
        assert "TOO LONG" in rest.stdout


def test_what_a_process_below_has_used_counts_also_after_its_end() -> None:
    before = tree_seconds(os.getpid())
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert tree_seconds(os.getpid()) - before >= 0.4
