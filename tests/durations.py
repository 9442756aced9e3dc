"""What each test file costs: a pytest plugin that prints the dearest ten and fails a run with a file above the limit.

Seconds are processor seconds of the whole tree of processes (ranks, launchers, fork server), not those of a clock: with two
workers on two cores they are what a file adds to a run, and they do not grow when somebody else uses the machine. What
does grow is their price on a slower processor, so the limit is scaled by a fixed piece of work, timed at the end.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from typing import Any

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
Costs = dict[str, tuple[float, float]]
"""Test file -> (processor seconds, seconds by the clock)."""


class Durations:
    """Registered by `conftest.py`; in a worker of pytest-xdist it hands what it measured to the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.costs: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._file = ""
        self._since = (tree_seconds(os.getpid()), time.monotonic())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins; what was used since the last file's first one was used by that file."""
        if not self._config.pluginmanager.hasplugin(
            "dsession"
        ):  # else workers run the tests, and this only tells of them
            self._turn_to(nodeid.split("::")[0])

    def _turn_to(self, file: str) -> None:
        if file == self._file:
            return
        now = (tree_seconds(os.getpid()), time.monotonic())
        if self._file:
            self._add(self._file, now[0] - self._since[0], now[1] - self._since[1])
        self._file, self._since = file, now

    def _add(self, file: str, cpu: float, wall: float) -> None:
        before = self.costs[file]
        self.costs[file] = (before[0] + max(0.0, cpu), before[1] + wall)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Of a worker: report. Of a run: fail when a file is too dear."""
        self._turn_to("")
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = dict(self.costs)
        elif session.exitstatus == pytest.ExitCode.OK and too_dear(self.costs, MUST_SECONDS * slowness()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        for file, (cpu, wall) in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self._add(file, cpu, wall)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The dearest files, and those above a limit."""
        if not self.costs:
            return
        factor, write = slowness(), terminalreporter.write_line
        total = sum(cpu for cpu, _ in self.costs.values())
        terminalreporter.section(f"{total:.0f} s of processor time (machine x {factor:.2f}); the dearest {SHOWN} files")
        for file, (cpu, wall) in sorted(self.costs.items(), key=lambda item: -item[1][0])[:SHOWN]:
            write(f"{cpu:7.1f} s  {wall:7.1f} s by the clock  {file}")
        for file in too_dear(self.costs, SHOULD_SECONDS * factor):
            cpu = self.costs[file][0]
            fails = " FAILED:" if file in too_dear(self.costs, MUST_SECONDS * factor) else ""
            write(
                f"TOO LONG:{fails} {file} used {cpu:.0f} s of processor time; {SHOULD_SECONDS * factor:.0f} s are meant, "
                f"{MUST_SECONDS * factor:.0f} s fail the run. Split it, or run fewer cells by default (tests/covering.py).",
                red=True,
            )


def too_dear(costs: Costs, limit: float) -> list[str]:
    """Files above `limit` processor seconds; none in a run that asked for more than the default, or is on GPUs."""
    more = FULL_GRID or not {"HF_DIST_KILLS", "HF_DIST_GPU_RESULTS"}.isdisjoint(os.environ)
    return [] if more else [file for file in costs if costs[file][0] > limit]


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
