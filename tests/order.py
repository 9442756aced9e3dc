"""Which worker of pytest-xdist runs which test file, and when: files that start ranks in one, the others beside them.

Two workers with two to four ranks each on two cores make each other late. Which files start ranks, and what they cost, is read
from `tests/durations.tsv`; a file that is not there counts as one that does. Dear files come first, so that the workers
end together; a worker that has no file of its kind left takes the cheapest of the other kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.durations import Cost, read_table

RANKS_SECONDS = 0.5
"""Processor seconds in other processes above which a file counts as one that starts ranks."""
UNKNOWN = Cost(cpu=30.0, ranks=30.0, wall=30.0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours, where files are what is handed out (`--dist loadfile`)."""
    return TwoKinds(config, log) if config.getvalue("dist") == "loadfile" else None


class TwoKinds(LoadScopeScheduling):
    """The first worker is given files with ranks, the others files without, dear ones first."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._table = read_table()

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        starts_ranks = self.nodes.index(node) == 0
        self.workqueue.move_to_end(chosen(list(self.workqueue), starts_ranks, self._table), last=False)
        super()._assign_work_unit(node)


def chosen(files: Sequence[str], starts_ranks: bool, table: dict[str, Cost]) -> str:
    """The file that a worker takes next: the dearest of its kind, else the cheapest of the others."""

    def cost(file: str) -> Cost:
        return table.get(file, UNKNOWN)

    own = [file for file in files if (cost(file).ranks > RANKS_SECONDS) == starts_ranks]
    return max(own, key=lambda file: cost(file).wall) if own else min(files, key=lambda file: cost(file).wall)
