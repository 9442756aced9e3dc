"""Replicas that meet a server at their own pace equal the same replicas in one process, in the order of the server's log."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.dist.ports import HeldPort
from tests.covering import FULL_GRID, FULL_GRID_ONLY, some_of
from tests.harness import run_ranks
from tests.parallel.local_sgd import served_trainings as trainings
from tests.parallel.local_sgd.emulation import Work
from tests.parallel.local_sgd.served_jobs import Emulation, Served, train
from tests.parity.train import relative
from tests.workers.launcher import launch
from tests.workers.served import SERVERS, WORK

DILOCO: dict[str, Any] = dict(every=2, outer_lr=0.7, momentum=0.9, nesterov=True)
TWO = Work(replicas=2, **DILOCO)


def zero(stage: int, **section: Any) -> dict[str, Any]:
    """The layout."""
    return {"zero_optimization": {"stage": stage, **section}}


CASES = {
    "zero3 of 2, a server of 2": Served(TWO, 2, 2, zero(3)),
    "zero0 of 2": Served(TWO, 2, 1, zero(0)),
    "three of 1, a server of 3": Served(Work(replicas=3, **DILOCO), 1, 3, zero(1)),
    "tp 2, tied": Served(Work(replicas=2, tied=True, **DILOCO), 2, 2, {"tensor_parallel": {"autotp_size": 2}}),
    "one of 4 in HSDP": Served(Work(replicas=1, **DILOCO), 4, 1, zero(3, mics_shard_size=2)),
    "offloaded, a part frozen": Served(
        Work(replicas=2, frozen=True, **DILOCO), 2, 1, zero(3, offload_optimizer={"device": "cpu"})
    ),
    "an adapter": Served(Work(replicas=2, lora=True, **DILOCO), 2, 1, zero(3)),
    "the mean of movements": Served(Work(replicas=2, every=2), 1, 2, zero(2)),
    "cp 2": Served(TWO, 2, 1, {"sequence_parallel_size": 2}),
}
FEW = ("three of 1, a server of 3", "tp 2, tied", "one of 4 in HSDP")


def check(log: list[tuple[str, int, int]], work: Work, found: list[dict[str, Any]]) -> None:
    """Losses and weights of the replicas that came to their end."""
    expected = Emulation(work).run(log)
    for replica in found:
        number = replica["replica"]
        assert replica["losses"] == pytest.approx(expected.losses[number], rel=1e-5)
        for name, values in expected.after[number].items() if replica["weights"] else ():
            assert relative(replica["weights"][name], values) <= 1e-5, (number, name)


@pytest.mark.parametrize("case", some_of(CASES, *FEW))
def test_equals_the_replicas_in_turn(case: str) -> None:
    served = CASES[case]
    found = run_ranks(train, served.world, (served,))
    server, replicas = found[: served.servers], found[served.servers :]
    work = served.work
    assert all(each["log"] == server[0]["log"] for each in server), "one order on all ranks of the server"
    assert len([call for call, _, _ in server[0]["log"] if call == "push"]) == work.replicas * 3
    check(server[0]["log"], work, replicas)
    # Weights, momentum and the sums of a round, without which there is no momentum.
    numel = sum(each["weights"].numel() for each in server)
    assert sum(each["nbytes"] for each in server) == numel * 4 * (3 if work.momentum else 1)
    for number in range(work.replicas):
        ranks = [each["sent"] for each in replicas if each["replica"] == number]
        pushed, pulled = (sum(column) for column in zip(*ranks, strict=True))
        assert (pushed, pulled) == (3 * 4 * numel, 4 * 4 * numel), "the weights come once more when it joins"


ENDS = {
    "killed": ([0, 0, 0, 0, -9], ("replica 2 is gone",)),
    "while_it_pushes": ([0, 0, 0, 0, -9], ("replica 2 is gone",)),
    "stopped": ([0, 0, 0, 0, -9], ()),
    "late": ([0, 0, 0, 0, 0], ("replica 2 joins, of 1 ranks",)),
}


@pytest.mark.parametrize("case", ENDS if FULL_GRID else ("while_it_pushes", "stopped", "late"))
def test_the_others_go_on(case: str, tmp_path: Path) -> None:
    codes, output, _ = launch(case, tmp_path, SERVERS + 3, 120, "tests.workers.served", sends_sigterm=False)
    expected, words = ENDS[case]
    assert codes == expected, output
    assert all(each in output for each in words), output
    log = torch.load(tmp_path / "found0", weights_only=False)["log"]
    replicas = [torch.load(path, weights_only=False) for path in sorted(tmp_path.glob("found[2-4]"))]
    assert len(replicas) == expected.count(0) - SERVERS
    check(log, WORK, replicas)
    pushes = [number for call, number, _ in log if call == "push"]
    assert [pushes.count(number) for number in range(3)] == [4, 4, 4 if case == "late" else 1]


def test_a_server_stays_until_replicas_that_are_told_to_end_have_saved(tmp_path: Path) -> None:
    codes, output, _ = launch("told", tmp_path, 3, 120, "tests.workers.served", sends_sigterm=False)
    assert codes == [0, 75, 75], output
    assert "role server: told to end; it stays until the trainer has ended" in output
    assert any(tmp_path.glob("checkpoint-*")) and any(tmp_path.glob("replica-1/checkpoint-*")), output


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    codes, output, _ = launch("server_killed", tmp_path, SERVERS + 3, 120, "tests.workers.served")
    assert None not in codes and 0 not in codes, output
    assert "server rank " in output, output  # the other rank of the server may be found gone first


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The folder and the report of one replica of one rank."""
    folder = str(tmp_path_factory.mktemp("one"))
    return folder, run_ranks(trainings.train, 2, (folder, 1, {}))[1]


LAYOUTS = {"pp 2": {"pipeline": {"stages": 2}}, "tp 2": {"tensor_parallel": {"autotp_size": 2}}}


@pytest.mark.parametrize("case", some_of(LAYOUTS, "pp 2"))
def test_a_replica_may_have_any_layout_and_resumes_in_another(
    case: str, one: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    found = run_ranks(trainings.train, 4, (str(tmp_path), 1, LAYOUTS[case], 0, 2))
    _same(found[2], one[1])
    # A new server: the replica brings the weights of its checkpoint, and the momentum.
    again = run_ranks(trainings.train, 3, (one[0], 1, LAYOUTS[case], 4))
    _same(again[1], one[1])


def test_resumes_bit_for_bit_in_its_own_layout(one: tuple[str, dict[str, Any]]) -> None:
    again = run_ranks(trainings.train, 2, (one[0], 1, {}, 4))[1]
    assert again["logs"] == one[1]["logs"] and again["version"] == 3
    assert all(torch.equal(value, one[1]["weights"][name]) for name, value in again["weights"].items())


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["version"] == expected["version"] == 3
    for ours, its in zip(found["logs"], expected["logs"], strict=True):
        assert ours == pytest.approx(its, rel=1e-5)
    for name, values in expected["weights"].items():
        assert relative(found["weights"][name], values) <= 1e-5, name


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=FULL_GRID_ONLY)])
def test_each_replica_has_its_rows_and_its_folder(streams: bool, tmp_path: Path) -> None:
    found = run_ranks(trainings.train, 5, (str(tmp_path), 2, zero(3), 0, 1, streams))[1:]
    for epoch in (slice(0, 12), slice(12, 24)):
        seen = Counter(row for each in found for row in each["seen"][epoch])
        assert set(seen.values()) == {1} and len(seen) == len(trainings.ROWS), "replicas share the rows of an epoch"
    for each in found:
        number = each["replica"][0]
        assert each["folder"] == str(tmp_path / f"replica-{number}" if number else tmp_path)
        assert each["saved"] == [2, 4, 6], "asked for after each step; they wait for a meeting"
        assert each["made"] == [True, True], "by its first process, whose LOCAL_RANK is not 0"
        assert each["samples"] == 10, "each evaluates all rows"
    assert found[0]["evaluated"] == found[1]["evaluated"] != found[2]["evaluated"]


def job(home: Path, case: str, ranks: int = 2) -> tuple[list[int | None], str]:
    """Codes and words of a job."""
    folder = home / case
    folder.mkdir()
    codes, output, _ = launch(case, folder, ranks, 600 if case == "serves" else 120, "tests.workers.served")
    return codes, output


def test_replicas_that_are_jobs_of_their_own_come_and_go(tmp_path: Path) -> None:
    """A server of two ranks outlives them. One is killed, and comes again while the other goes on."""
    with HeldPort() as port, ThreadPoolExecutor() as jobs:
        (tmp_path / "port").write_text(str(port.number))
        serving = jobs.submit(job, tmp_path, "serves")
        try:
            dying, going = jobs.submit(job, tmp_path, "dies"), jobs.submit(job, tmp_path, "goes_on")
            codes, output = dying.result()
            assert -9 in codes and 0 not in codes, output
            for coming in (jobs.submit(job, tmp_path, "comes_again"), going):
                codes, output = coming.result()
                assert codes == [0, 0], output
        finally:
            for rank in range(2):
                os.kill(int((tmp_path / f"server{rank}").read_text()), signal.SIGKILL)
        output = serving.result()[1]
    assert output.count("replica 0 joins, of 2 ranks") == 2, output
    log = json.loads((tmp_path / "log0.json").read_text())
    assert log == json.loads((tmp_path / "log1.json").read_text())
    # The first replica's two pushes are in the weights; the second start of it begins anew, with its own optimizer.
    pushes = [number for call, number, _ in log if call == "push"]
    assert pushes.count(1) == 4 and pushes.count(0) == 2 + 4
