"""The guard on what test files cost: a file above the limit fails a run that was green, with one worker and with two."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme
from tests.durations import Cost, grown, read_run, read_table, tree_seconds, write_run, write_table
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


def test_what_a_run_cost_is_kept_and_compared(tmp_path: Path) -> None:
    run, table = tmp_path / "run.json", tmp_path / "table.tsv"
    cases = {"a.py::one": Cost(10, 8, 6), "a.py::two": Cost(2, 0, 2), "b.py::one": Cost(3, 0, 3)}
    write_run(cases, {"a.py": {"train llama": 7.5}}, run)
    assert read_run(run)[1] == cases
    write_table(2.0, cases, table)
    assert read_table(table) == {"a.py": Cost(6, 4, 4), "b.py": Cost(1.5, 0, 1.5)}
    assert grown(2.0, cases, read_table(table)) == []
    more = {**cases, "a.py::three": Cost(14, 0, 14), "c.py::one": Cost(12, 0, 12)}
    lines = grown(2.0, more, read_table(table))
    assert [line.split()[-1] for line in lines] == ["a.py", "c.py"], "7 seconds more, and a new file of 6"


def test_a_job_of_ranks_is_told_apart_from_the_case_that_pays_for_its_spawn(tmp_path: Path) -> None:
    from tests.attempts import _note_cost
    from tests.durations import Durations

    measured = Durations.__new__(Durations)
    measured.cases, measured.jobs, measured._case, measured._noted = {}, {}, "", tmp_path / "jobs"
    measured._since = (0.0, 0.0, 0.0)
    measured._turn_to("tests/test_a.py::first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DIST_JOB_COSTS", str(tmp_path / "jobs"))
        for rank in range(2):
            _note_cost(functools.partial(print, rank, "llama-z3"), 1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DIST_JOB_COSTS", str(tmp_path / "gone" / "jobs"))
        _note_cost(functools.partial(print, 0, "a run without the plugin"), 1.5)
    measured._turn_to("tests/test_a.py::second")
    assert measured.jobs == {"tests/test_a.py": {"llama-z3": 3.0}}
    assert list(measured.cases) == ["tests/test_a.py::first"]


def test_the_page_about_the_tests_is_that_of_the_docstrings_and_the_table() -> None:
    assert readme.page() == readme.PAGE.read_text(encoding="utf-8"), "python -m tests.readme"
