"""A replica is lost with all its ranks: the job restarts with what is left, and loses the steps since the last meeting."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.parallel.local_sgd.lost import EVERY, LOST_AT, STEPS
from tests.workers.launcher import launch

WORKER = "tests.parallel.local_sgd.lost"
MET = LOST_AT - LOST_AT % EVERY
"""The last meeting before."""


def logged(folder: Path) -> list[tuple[int, list[float], int]]:
    """(step, [loss, gradient norm], ranks) in the order written."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [(step, numbers, world) for step, *numbers, world in lines]


@pytest.mark.timeout(400)
def test_a_lost_replica_costs_the_steps_since_the_last_meeting_and_what_is_left_is_one_process(tmp_path: Path) -> None:
    folder, alone = tmp_path / "replicas", tmp_path / "alone"
    folder.mkdir()
    codes, said, _ = launch("replicas", folder, world=4, timeout=120, worker=WORKER)
    assert codes[2:] == [-signal.SIGKILL] * 2 and 0 not in codes and None not in codes, said
    assert "2 replicas train alone" in said
    assert [path.name for path in folder.glob("checkpoint-*")].count(f"checkpoint-{MET}") == 1
    assert not list(folder.glob(f"checkpoint-{LOST_AT}")), "nobody saves what the replicas do not agree on"
    shutil.copytree(folder / f"checkpoint-{MET}", alone / f"checkpoint-{MET}")

    codes, said, _ = launch("replicas", folder, world=2, timeout=120, worker=WORKER)
    assert codes == [0, 0], said
    assert "one replica, so no meetings of replicas" in said and f"checkpoint-{MET}" in said
    again = [(step, numbers) for step, numbers, world in logged(folder) if world == 2]
    assert [step for step, _ in again] == list(range(MET + 1, STEPS + 1)), "an interval is lost at most"

    codes, said, _ = launch("alone", alone, world=1, timeout=120, worker=WORKER)
    assert codes == [0], said
    for (step, numbers), (_, expected, _) in zip(again, logged(alone), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-5), step
