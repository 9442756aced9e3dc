"""The test run of `tests/run.sh`: pytest, then once more, alone and in one process, the cases that failed.

    python -m tests.second_try [pytest arguments]

A test that fails for a reason of its own (a machine that stood still, a port) must not cost a day, nor be hidden. So what
passes on the second try is listed with its first error, in the output and in `.second_try.txt`. The exit status is 0 only
if everything passed in the end and at most `MOST_EVENTS` things went wrong before. Cases with the very same first error
count as one: one spawn runs many cases, and if it fails as a whole, all of them report it.

Every such event gets a line in `tests/flaky.tsv`, by hand. A case that is there twice must be mended or deleted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTE = ROOT / ".second_try.txt"
HISTORY = ROOT / "tests" / "flaky.tsv"
VARIABLE = "HF_DIST_FAILED_CASES"
"""Names the file into which a run of pytest writes its failed cases."""
MOST_EVENTS = 3
MOST_RERUNS = 100
"""More failed cases than that are a broken commit; running them again would only take longer."""
FAILED = int(pytest.ExitCode.TESTS_FAILED)
Errors = dict[str, str]
"""Case -> its error."""


class FailedCases:
    """Registered by `conftest.py`: writes the failed cases of a run to the file that `VARIABLE` names."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.errors: Errors = {}
        self.uncollected = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case, its set-up or its end has failed."""
        if report.failed:
            self.errors.setdefault(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read has no cases to try again."""
        self.uncollected = self.uncollected or report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Of the process that reports; workers of pytest-xdist write nothing."""
        if not hasattr(session.config, "workeroutput"):
            self._path.write_text(json.dumps({"errors": self.errors, "uncollected": self.uncollected}))


def run_pytest(words: Sequence[str], found: Path) -> tuple[int, dict[str, Any]]:
    """Exit status of a run, and what `FailedCases` wrote."""
    found.unlink(missing_ok=True)
    status = subprocess.run([sys.executable, "-m", "pytest", *words], env={**os.environ, VARIABLE: str(found)})
    written = json.loads(found.read_text()) if found.exists() else {"errors": {}, "uncollected": True}
    return status.returncode, written


def events(errors: Mapping[str, str]) -> dict[str, list[str]]:
    """Error -> the cases of one file that report it."""
    found: dict[str, list[str]] = {}
    for case, error in errors.items():
        found.setdefault(case.split("::")[0] + "\n" + _last_words(error), []).append(case)
    return found


def _last_words(error: str) -> str:
    """The lines that pytest marks with E, which do not show the case's own parameters; all of it if there are none."""
    marked = [line for line in error.splitlines() if line.startswith("E ")]
    return "\n".join(marked) or error


def second_note(first: Errors, second: Errors) -> str:
    """What passed on the second try, with its first error; empty if nothing did."""
    passed = {case: error for case, error in first.items() if case not in second}
    if not passed:
        return ""
    lines = [f"passed on the second try: {len(passed)} cases of {len(events(passed))} events (tests/flaky.tsv)"]
    for cases in events(passed).values():
        lines += ["", *cases, *(f"    {line}" for line in _last_words(passed[cases[0]]).splitlines()[:40])]
    return "\n".join(lines) + "\n"


def verdict(first: Errors, second: Errors) -> int:
    """The exit status after both tries."""
    return 0 if not second and len(events(first)) <= MOST_EVENTS else FAILED


def main(words: Sequence[str]) -> int:
    """Run pytest with these arguments, then what failed; the exit status."""
    NOTE.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "failed.json")
        status, first = run_pytest(words, found)
        errors: Errors = first["errors"]
        if status != FAILED or first["uncollected"] or not errors:
            return status
        if len(errors) > MOST_RERUNS:
            print(f"{len(errors)} cases failed: none is tried again")
            return status
        print(f"\n{len(errors)} cases failed; each is tried once more, alone\n", flush=True)
        status, again = run_pytest(["-q", "-p", "no:durations", *errors], found)
        if status not in (0, FAILED) or again["uncollected"]:
            return status or FAILED
    note = second_note(errors, again["errors"])
    if note:
        NOTE.write_text(note)
        print(f"\n{note}", flush=True)
    return verdict(errors, again["errors"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
