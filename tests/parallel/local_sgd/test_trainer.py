"""The Trainer and one's own loops over replicas that train alone: counts, logs, evaluation, saves, signals, skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID, some_of
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.parallel.local_sgd.emulation import Work, emulate
from tests.parallel.local_sgd.trainings import EVEN
from tests.parity.train import relative

JOB = "tests.parallel.local_sgd.trainings:"
PLAIN: dict[int, list[Job]] = {
    2: [(f"{JOB}plain", {"stage": 0, "shard": 1})],
    4: [(f"{JOB}plain", {"stage": 3, "shard": 2})],
}
PLAIN = some_of(PLAIN, 2)
STEPS = 7 if FULL_GRID else 5
WATCHED: Job = (f"{JOB}watched", {"resume_at": 4, "max_steps": STEPS})
IN_TURN: Job = (f"{JOB}watched", {"resume_at": 4, "in_turn": True, "max_steps": STEPS})
"""Fragments meet in turn; for a save, or an evaluation, all do."""
# That a run resumes where fragments are on their way, and saves once all have met: `test_checkpoints.py`, and `TOLD_IN_TURN`.
WATCHED_WAYS = some_of({"at once": WATCHED, "in turn": IN_TURN}, "at once")
SHARD = 2 if FULL_GRID else 1
TOLD: Job = (f"{JOB}told", {"shard": SHARD})
TOLD_IN_TURN: Job = (f"{JOB}told", {"in_turn": True, "shard": SHARD})
TOLD_WAYS = some_of({"at once": TOLD, "in turn": TOLD_IN_TURN}, "in turn")  # for a save, all fragments meet
LOOP: Job = (f"{JOB}loop", {"steps": 5})
WITHOUT: Job = (f"{JOB}loop_without_replicas", {})
SKIPPED: Job = (f"{JOB}skipped", {"steps": 6, "at": (3, 4)})
STATISTICS: Job = (f"{JOB}statistics", {"steps": 4})
JOBS: dict[int, list[Job]] = {
    2: [*PLAIN[2], LOOP, WITHOUT, SKIPPED, STATISTICS],
    4: [*PLAIN.get(4, []), *WATCHED_WAYS.values()],
}
JOBS[2 * SHARD] += TOLD_WAYS.values()
Outcomes = Callable[[int], dict[str, list[Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By number of ranks."""
    return outcomes_by_world(JOBS, tmp_path_factory)


@pytest.mark.parametrize("world", PLAIN)
def test_with_sgd_and_a_meeting_at_every_step_the_trainer_is_one_process(
    world: int, outcomes: Outcomes, tmp_path: Path
) -> None:
    trainer = EVEN.in_one_process(tmp_path, world)
    trainer.train()
    expected = {name: p.detach() for name, p in trainer.model.named_parameters()}
    (ours, *_) = found(outcomes, world, PLAIN[world][0])
    for name, weight in ours["weights"].items():
        if name in expected:
            assert relative(weight, expected[name]) < 1e-5, name


def test_items_of_a_window_are_counted_over_the_replica(outcomes: Outcomes) -> None:
    ranks = [rank["whole"] for rank in found(outcomes, 4, WATCHED)]
    for replica in ((0, 1), (2, 3)):
        for windows in zip(*(ranks[rank]["counted"] for rank in replica), strict=True):
            assert len({items for _, items in windows}) == 1
            assert windows[0][1] == sum(labels for labels, _ in windows)
        assert {ranks[rank]["seen"] for rank in replica} == {2 * sum(ranks[rank]["tokens"] for rank in replica)}
    assert ranks[0]["counted"] != ranks[2]["counted"]
    assert {rank["processes"] for rank in ranks} == {2}


def test_nothing_crosses_between_replicas_until_they_meet(outcomes: Outcomes) -> None:
    """Steps that are logged, asked to save, asked to evaluate, counted in tokens; a meeting asks for signals, too."""
    for rank in found(outcomes, 4, WATCHED):
        notes = rank["whole"]["notes"]
        assert [step for step, _, _ in notes] == list(range(1, STEPS + 1))
        for step, entries, foreign in notes:
            if step in range(1, STEPS, 2):
                # What follows a meeting is asked in the window after it: the question for signals, at its first microbatch.
                asked = [entry for entry in entries if entry[1] == "control"]
                assert entries == asked and len(asked) == (2 if step > 1 or asked else 0), (step, entries)
                assert foreign == 0 or step == 1, "accelerate's own collectives"


@pytest.mark.parametrize("job", list(WATCHED_WAYS.values()), ids=list(WATCHED_WAYS))
def test_evaluations_and_saves_wait_for_a_meeting_and_the_last_step_is_one(job: Job, outcomes: Outcomes) -> None:
    for rank in found(outcomes, 4, job):
        assert rank["whole"]["saved"] == [*range(2, STEPS, 2), STEPS]
        assert [step for step, _ in rank["whole"]["evaluated"]] == [*range(4, STEPS, 2), STEPS]
    ranks = found(outcomes, 4, job)
    assert len({str(rank["whole"]["evaluated"]) for rank in ranks}) == 1, "one loss for all replicas"


def test_the_log_is_the_replicas_own(outcomes: Outcomes) -> None:
    logs = [rank["whole"]["logs"] for rank in found(outcomes, 4, WATCHED)]
    assert logs[0] == logs[1] and logs[2] == logs[3]
    assert [entry[1] for entry in logs[0]] != [entry[1] for entry in logs[2]]
    assert [entry[3] for entry in logs[0]] == [entry[3] for entry in logs[2]], "one learning rate"


@pytest.mark.parametrize("job", list(WATCHED_WAYS.values()), ids=list(WATCHED_WAYS))
def test_a_run_that_resumes_at_a_meeting_is_the_one_that_did_not_stop_bit_for_bit(job: Job, outcomes: Outcomes) -> None:
    for number, rank in enumerate(found(outcomes, 4, job)):
        whole, again = rank["whole"], rank["again"]
        # What came before the checkpoint is told by rank 0's file: the log, and the count, of its replica.
        assert again["logs"][4:] == whole["logs"][4:] and (again["seen"] == whole["seen"] or number > 1)
        assert again["evaluated"] == whole["evaluated"]
        for kind in ("weights", "optimizer"):
            assert str(again["state"][kind]) == str(whole["state"][kind])


@pytest.mark.parametrize("job", list(TOLD_WAYS.values()), ids=list(TOLD_WAYS))
def test_a_signal_is_answered_at_the_next_meeting(job: Job, outcomes: Outcomes) -> None:
    for rank in found(outcomes, 2 * SHARD, job):
        assert rank["code"] == 75
        assert rank["saved"] == ["checkpoint-4"]


def test_accelerates_local_sgd_says_when_replicas_meet(outcomes: Outcomes) -> None:
    expected = emulate(Work(every=2, steps=5))["weights"]
    (first, _) = found(outcomes, 2, LOOP)
    for name, weight in expected.items():
        assert relative(first["weights"][name], weight) < 1e-5, name
    for outcome in found(outcomes, 2, WITHOUT):
        assert "local_sgd.every: is missing" in outcome["said"] and '"local_sgd": {"every": 2}' in outcome["said"]


def test_a_step_that_one_replica_skips_is_a_step_of_all(outcomes: Outcomes) -> None:
    first, second = found(outcomes, 2, SKIPPED)
    assert first["skips"] == [False] * 6 and second["skips"] == [False, False, True, True, False, False]
    assert torch.equal(second["masters"][2], second["masters"][1]) and not torch.equal(
        first["masters"][2], first["masters"][1]
    )
    for step in range(2, 6):  # at the first the rate is zero
        assert torch.equal(first["masters"][step], second["masters"][step]) is (step % 2 == 1), step
        assert (first["evaluated"][step] == second["evaluated"][step]) is (step % 2 == 1), step
    assert first["rates"] == second["rates"], "the schedule counts steps, skipped ones too"
    assert first["scales"] == [1024, 1024, 1024, 256, 256, 256] and second["scales"] == [1024, 1024, 512, 256, 256, 256]


def test_replicas_that_meet_have_the_statistics_of_one(outcomes: Outcomes) -> None:
    first, second = found(outcomes, 2, STATISTICS)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        differing = {name for name in one if not torch.equal(one[name], other[name])}
        names = {name.rpartition(".")[2] for name in differing} - {"lookup"}  # a table for each rank's rows
        own = {"running_mean", "running_var", "running", "running_sum", "rows", "replaced"}
        assert names >= own if step % 2 == 0 else not names, (step, names)
