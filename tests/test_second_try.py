"""The test run itself: what fails once is tried again, told and counted; what fails twice, or fails often, fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes, second_try
from tests.durations import Cost
from tests.harness import ROOT
from tests.order import chosen

CONFTEST = """
import os

from tests import second_try


def pytest_configure(config):
    config.pluginmanager.register(second_try.FailedCases(os.environ[second_try.VARIABLE]))
"""
ONCE = """
import pathlib

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    first = not seen.exists()
    seen.touch()
    assert not first, "{reason}"
"""
ALWAYS = "def test_fails_always():\n    assert 0, 'a real fault'\n"
FINE = "def test_passes():\n    pass\n"
BROKEN = "import nothing_of_that_name\n"


def run(folder: Path, workers: int, **files: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The run of a folder with these test files, and the note it leaves."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    code = (
        "import pathlib, sys; from tests import second_try; second_try.NOTE = pathlib.Path('note.txt'); "
        "sys.exit(second_try.main(sys.argv[1:]))"
    )
    words = ["-p", "no:cacheprovider", *(("-p", "xdist", "-n", str(workers)) if workers > 1 else ()), "."]
    environment = {k: v for k, v in os.environ.items() if k != second_try.VARIABLE}
    environment |= {"PYTHONPATH": ROOT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = processes.run([sys.executable, "-c", code, *words], cwd=folder, env=environment, timeout=200)
    note = folder / "note.txt"
    return done, note.read_text() if note.exists() else ""


@pytest.mark.parametrize(
    ("files", "status", "told"),
    [
        ({"fine": FINE}, 0, []),
        (
            {"fine": FINE, "once": ONCE.format(count=1, reason="an unlucky port")},
            0,
            ["test_once.py::test_fails_once[0]", "an unlucky port"],
        ),
        (
            {"always": ALWAYS, "once": ONCE.format(count=1, reason="an unlucky port")},
            1,
            ["test_once.py::test_fails_once[0]"],
        ),
        ({"always": ALWAYS}, 1, []),
        ({"once": ONCE.format(count=4, reason="number {number}").replace('"number', 'f"number')}, 1, ["number 3"]),
        ({"once": ONCE.format(count=9, reason="one spawn")}, 0, ["test_once.py::test_fails_once[8]", "of 1 events"]),
        ({"broken": BROKEN, "once": ONCE.format(count=1, reason="an unlucky port")}, 2, []),
    ],
    ids=["nothing fails", "once", "once and always", "always", "four events", "nine cases of one event", "unreadable"],
)
def test_a_case_that_passes_on_the_second_try_is_told_and_not_fatal(
    files: dict[str, str], status: int, told: list[str], tmp_path: Path
) -> None:
    done, note = run(tmp_path, 2 if "fine" in files else 1, **files)
    assert done.returncode == status, done.stdout + done.stderr
    assert bool(note) == bool(told)
    for word in told:
        assert word in note and word in done.stdout
    assert "test_fails_always" not in note


def test_a_case_that_went_wrong_twice_is_mended_or_deleted() -> None:
    """`tests/flaky.tsv`, kept by hand: the last column names the commit that mended what the event showed."""
    open_events: dict[str, int] = {}
    for line in second_try.HISTORY.read_text().splitlines()[1:]:
        date, commit, case, error, mended = line.split("\t")
        assert date and commit and error, line
        if mended == "":
            open_events[case] = open_events.get(case, 0) + 1
    assert [case for case, count in open_events.items() if count > 1] == []


def test_dear_files_come_first_and_each_worker_takes_its_own_kind() -> None:
    table = {
        "ranks": Cost(60, 50, 40),
        "more ranks": Cost(90, 50, 70),
        "pure": Cost(9, 0, 9),
        "purer": Cost(2, 0.1, 2),
        "sleeps": Cost(9, 8, 80),
    }
    assert chosen(list(table), "ranks", table) == "more ranks"
    assert chosen(list(table), "alone", table) == "pure"
    assert chosen(list(table), "waits", table) == "sleeps"
    assert chosen(["ranks", "more ranks", "new"], "alone", table) == "new", (
        "the cheapest, and what is not known may start ranks"
    )
    assert chosen(["pure", "purer"], "waits", table) == "purer"
