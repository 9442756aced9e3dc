"""Which worker of pytest-xdist runs which test file, and when: files that start ranks in one, others beside them.

Ranks wait for each other, so a job of ranks uses one core and a half of two, and a file that mostly waits (for time-outs, for
restarts) leaves a core idle. So of three workers one takes files that start ranks, one those without, one those that wait (a
fourth took 7% less by the clock in one measurement and 5% more in another). What a file costs is read from
`tests/durations.tsv`; a file that is not there counts as one that starts ranks. Dear files come first, so that the workers
end together; a worker that has no file of its kind left takes the cheapest of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.durations import Cost, read_table

RANKS_SECONDS = 0.5
"""Processor seconds in other processes above which a file counts as one that starts ranks."""
WAITS_SECONDS = 10.0
"""Seconds by the clock, more than twice those of a processor, above which a file counts as one that waits."""
UNKNOWN = Cost(cpu=30.0, ranks=30.0, wall=30.0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours, where files are what is handed out (`--dist loadfile`)."""
    return ByKind(config, log) if config.getvalue("dist") == "loadfile" else None


KINDS = ("ranks", "alone", "waits")


class ByKind(LoadScopeScheduling):
    """Each worker is given files of its kind, dear ones first."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._table = read_table()

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        kind = KINDS[self.nodes.index(node) % len(KINDS)]
        self.workqueue.move_to_end(chosen(list(self.workqueue), kind, self._table), last=False)
        super()._assign_work_unit(node)


def kind_of(cost: Cost) -> str:
    """One of `KINDS`."""
    if cost.wall > WAITS_SECONDS and cost.wall > 2 * cost.cpu:
        return "waits"
    return "ranks" if cost.ranks > RANKS_SECONDS else "alone"


def chosen(files: Sequence[str], kind: str, table: dict[str, Cost]) -> str:
    """The file that a worker takes next: the dearest of its kind, else the cheapest of the others."""

    def seconds(file: str) -> float:
        return table.get(file, UNKNOWN).wall

    own = [file for file in files if kind_of(table.get(file, UNKNOWN)) == kind]
    return max(own, key=seconds) if own else min(files, key=seconds)
