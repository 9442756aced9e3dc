"""What every test costs: a pytest plugin that writes it down and fails a run with a file above the limit.

    python -m tests.durations            # which files grew since the table in the repository was written
    python -m tests.durations --keep     # write tests/durations.tsv from the last run
    python -m tests.durations --jobs parity/test_grid.py     # the jobs of its ranks in the last run, dearest first

Seconds are processor seconds of the whole tree of processes (ranks, launchers, fork server), not those of a clock: with two
workers on two cores they are what a file adds to a run, and they do not grow when somebody else uses the machine. What
does grow is their price on a slower processor, so the limit is scaled by a fixed piece of work, timed at the end.

Every run writes `.durations.json` (ignored by git): the cases that ran, with seconds of processor time, of the part of it that
other processes used, and of the clock.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.covering import FULL_GRID

SHOULD_SECONDS = 60.0
"""A file above it is named; split it or make it cheaper."""
MUST_SECONDS = 180.0
"""A file above it fails the run. The gap is what one machine differs from another, and one run from the next: a
file took 71 s and 103 s in two runs on the same machine, beside nothing of ours."""
SHOWN = 10
REFERENCE_SECONDS = 0.020
"""`_fixed_work` on the machine on which the limits were set."""
ROOT = Path(__file__).resolve().parent.parent
JOB_COSTS = "HF_DIST_JOB_COSTS"
"""Names the file into which `tests/attempts.py` writes a line per job and rank."""
LAST_RUN = ROOT / ".durations.json"
TABLE = ROOT / "tests" / "durations.tsv"
GREW_SECONDS, GREW_FACTOR = 5.0, 1.25
"""A file grew if it exceeds the table by both: one run differs from the next by less."""


class Cost(NamedTuple):
    """Seconds: of processors, of those in other processes than the worker's own, and of the clock."""

    cpu: float = 0.0
    ranks: float = 0.0
    wall: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """The sum of both, each kind of second by itself."""
        return Cost(*(round(a + b, 4) for a, b in zip(self, other, strict=True)))


Costs = dict[str, Cost]
"""Test case or test file -> what it cost."""
Jobs = dict[str, dict[str, float]]
"""Test file -> job of ranks (`tests/attempts.py`) -> processor seconds of all ranks. The case that asks first pays for all."""


class Durations:
    """Registered by `conftest.py`; in a worker of pytest-xdist it hands what it measured to the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.cases: Costs = {}
        self.jobs: Jobs = {}
        self._case = ""
        self._folder = tempfile.TemporaryDirectory(prefix="hf_dist-costs-", ignore_cleanup_errors=True)
        self._noted = Path(self._folder.name, "jobs")
        os.environ[JOB_COSTS] = str(self._noted)  # ranks inherit it, also through the fork server
        self._since = _used()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins; what was used since the last one began was used by that one."""
        if not self._config.pluginmanager.hasplugin("dsession"):  # else workers run tests, and this only tells of them
            self._turn_to(nodeid)

    def _turn_to(self, case: str) -> None:
        now = _used()
        if self._case:
            spent = Cost(*(max(0.0, after - before) for after, before in zip(now, self._since, strict=True)))
            self.cases[self._case] = self.cases.get(self._case, Cost()).plus(spent)
            if self._noted.exists():
                for line in self._noted.read_text().splitlines():
                    seconds, _, job = line.partition("\t")
                    jobs = self.jobs.setdefault(self._case.split("::")[0], {})
                    jobs[job] = round(jobs.get(job, 0.0) + float(seconds), 3)
                self._noted.unlink()
        self._case, self._since = case, now

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Of a worker: report. Of a run: write what it cost, and fail when a file is too dear."""
        self._turn_to("")
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = {case: list(cost) for case, cost in self.cases.items()}
            session.config.workeroutput["jobs"] = self.jobs
            return
        if self.cases and session.config.rootpath == ROOT:
            write_run(self.cases, self.jobs, LAST_RUN)
        if session.exitstatus == pytest.ExitCode.OK and too_dear(by_file(self.cases), MUST_SECONDS * slowness()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        for case, cost in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self.cases[case] = self.cases.get(case, Cost()).plus(Cost(*cost))
        self.jobs |= getattr(node, "workeroutput", {}).get("jobs", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The dearest files, and those above a limit."""
        if not self.cases:
            return
        factor, write, files = slowness(), terminalreporter.write_line, by_file(self.cases)
        total = sum(cost.cpu for cost in files.values())
        terminalreporter.section(f"{total:.0f} s of processor time (machine x {factor:.2f}); the dearest {SHOWN} files")
        for file, cost in sorted(files.items(), key=lambda item: -item[1].cpu)[:SHOWN]:
            write(f"{cost.cpu:7.1f} s  {cost.wall:7.1f} s by the clock  {file}")
        for file in too_dear(files, SHOULD_SECONDS * factor):
            fails = " FAILED:" if file in too_dear(files, MUST_SECONDS * factor) else ""
            write(
                f"TOO LONG:{fails} {file} used {files[file].cpu:.0f} s of processor time; {SHOULD_SECONDS * factor:.0f} s are "
                f"meant, {MUST_SECONDS * factor:.0f} s fail the run. Split it, or run fewer cells by default.",
                red=True,
            )


def _used() -> tuple[float, float, float]:
    tree = tree_seconds(os.getpid())
    return tree, max(0.0, tree - time.process_time()), time.monotonic()


def by_file(cases: Costs) -> Costs:
    """What the files of these cases cost."""
    files: defaultdict[str, Cost] = defaultdict(Cost)
    for case, cost in cases.items():
        file = case.split("::")[0]
        files[file] = files[file].plus(cost)
    return dict(files)


def too_dear(files: Costs, limit: float) -> list[str]:
    """Files above `limit` processor seconds; none in a run that asked for more than the default, or is on GPUs."""
    more = FULL_GRID or not {"HF_DIST_KILLS", "HF_DIST_GPU_RESULTS"}.isdisjoint(os.environ)
    return [] if more else [file for file in files if files[file].cpu > limit]


def tree_seconds(root: int) -> float:
    """Processor seconds of a process and all below it, those included that have ended and were waited for."""
    if not os.path.isdir("/proc/self"):
        return sum(os.times()[:4])
    ticks = os.sysconf("SC_CLK_TCK")
    below: defaultdict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as f:
                fields = f.read().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        below[int(fields[1])].append(int(name))
        used[int(name)] = sum(map(int, fields[11:15])) / ticks
    total, left = 0.0, [root]
    while left:
        process = left.pop()
        total += used.get(process, 0.0)
        left += below[process]
    return total


@functools.cache
def slowness() -> float:
    """How much longer this processor takes than the one on which the limits were set; at least 1."""
    return max(1.0, min(_fixed_work() for _ in range(5)) / REFERENCE_SECONDS)


def _fixed_work() -> float:
    start, total = time.process_time(), 0
    for i in range(400_000):
        total += i * i & 7
    return time.process_time() - start


# ---- what is kept between runs


def write_run(cases: Costs, jobs: Jobs, path: Path) -> None:
    """Write what a run measured, for `python -m tests.durations`."""
    run = {"machine": round(slowness(), 3), "cases": dict(sorted(cases.items())), "jobs": dict(sorted(jobs.items()))}
    path.write_text(json.dumps(run, indent=0) + "\n")


def read_run(path: Path = LAST_RUN) -> tuple[float, Costs]:
    """How slow the machine of the last run was, and what its cases cost."""
    run = json.loads(path.read_text())
    return run["machine"], {case: Cost(*cost) for case, cost in run["cases"].items()}


def write_table(machine: float, cases: Costs, path: Path = TABLE) -> None:
    """The table in the repository: a line per file, seconds of a machine of speed 1."""
    numbers: defaultdict[str, int] = defaultdict(int)
    for case in cases:
        numbers[case.split("::")[0]] += 1
    lines = ["file\tcases\tcpu\tranks\tclock"]
    for file, cost in sorted(by_file(cases).items()):
        lines.append("\t".join([file, str(numbers[file]), *(f"{seconds / machine:.1f}" for seconds in cost)]))
    path.write_text("\n".join(lines) + "\n")


def read_table(path: Path = TABLE) -> Costs:
    """What the files cost when the table was written; empty if there is none."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {file: Cost(*map(float, cost)) for file, _, *cost in (line.split("\t") for line in lines)}


def grown(machine: float, cases: Costs, table: Costs) -> list[str]:
    """A line for every file that costs more than the table says, dearest growth first."""
    now = {file: cost.cpu / machine for file, cost in by_file(cases).items()}
    more = {file: cpu - table.get(file, Cost()).cpu for file, cpu in now.items()}
    names = [
        file
        for file in sorted(more, key=lambda file: -more[file])
        if more[file] > GREW_SECONDS and now[file] > GREW_FACTOR * table.get(file, Cost()).cpu
    ]
    return [f"{more[file]:+7.1f} s: {now[file]:.1f} s of processor time  {file}" for file in names]


def main(words: list[str]) -> None:
    """Compare the last run with the table, or write the table."""
    machine, cases = read_run()
    if words == ["--keep"]:
        write_table(machine, cases)
        print(f"{TABLE.relative_to(ROOT)}: {len(by_file(cases))} files, {len(cases)} cases")
        return
    if words[:1] == ["--jobs"]:
        for file, jobs in json.loads(LAST_RUN.read_text())["jobs"].items():
            for job, seconds in sorted(jobs.items(), key=lambda item: -item[1]):
                if any(word in file for word in words[1:]):
                    print(f"{seconds:7.2f} s  {file.removeprefix('tests/')}: {job}")
        return
    table, files = read_table(), by_file(cases)
    print("\n".join(grown(machine, cases, table)) or "no file grew")
    now, before = (sum(costs[file].cpu for file in files if file in costs) for costs in (files, table))
    print(f"{len(files)} files: {now / machine:.0f} s of processor time now, {before:.0f} s in the table")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
