"""Replicas that train alone equal R models in turn in one process; with SGD and a meeting at every step, data parallelism."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.local_sgd.emulation import Work, emulate, together
from tests.parallel.local_sgd.on_ranks import Layout, parts_of, run_cases
from tests.parity.train import relative

DILOCO: dict[str, Any] = dict(outer_lr=0.7, momentum=0.9, nesterov=True)
PLAIN = Work(inner="sgd")
CASES: dict[int, list[tuple[Work, Layout]]] = {
    2: [
        *((PLAIN, Layout(stage, clip=False)) for stage in (0, 3)),
        (Work(every=3), Layout(0)),
        (Work(every=1, tied=True), Layout(1)),
        (Work(every=3, outer_lr=0.7, momentum=0.9, nesterov=True), Layout(3)),
        (Work(every=4, outer_lr=0.7, momentum=0.9), Layout(2)),
        (Work(every=3, outer_lr=0.7, momentum=0.9, nesterov=True, lora=True), Layout(3)),
        (Work(every=4, steps=8, fragments=2, **DILOCO), Layout(0)),
        (Work(every=3, fragments=1, overlap=2, mix=0.5, **DILOCO), Layout(1)),
        (Work(every=2, fragments=3, overlap=1), Layout(3)),
    ],
    4: [
        *((Work(every=3, outer_lr=0.7, momentum=0.9, nesterov=True), Layout(stage, 2)) for stage in (0, 1, 2, 3)),
        (PLAIN, Layout(2, 2, clip=False)),
        (Work(every=3), Layout(3, 2)),
        (Work(every=3, outer_lr=0.7, momentum=0.9, frozen=True), Layout(3, 2, "cpu")),
        (Work(every=3, outer_lr=0.7, momentum=0.9, nesterov=True, tied=True), Layout(1, 1, pp=2)),
        *((Work(every=3, outer_lr=0.7, momentum=0.9), Layout(3, 2, cp=2, copies=copies)) for copies in (1, 2)),
        (Work(replicas=4, every=2, outer_lr=0.9), Layout(1)),
        *((Work(every=3, fragments=3, overlap=1, mix=0.25, **DILOCO), Layout(stage, 2)) for stage in (2, 3)),
        (Work(every=3, fragments=2, overlap=2, frozen=True, **DILOCO), Layout(3, 2, "cpu")),
        (Work(every=3, fragments=2, overlap=1, tied=True, **DILOCO), Layout(1, 1, pp=2)),
        (Work(replicas=4, every=4, steps=7, fragments=2, overlap=1, mix=0.5), Layout(2)),
    ],
}
if not FULL_GRID:  # of two ranks every stage and most works; of four a sequence with copies, and fragments in shards
    SOME = {2: (1, 3, 6, 7, 9), 4: (9, 12)}
    CASES = {world: [cases[i] for i in SOME[world]] for world, cases in CASES.items()}
NAMED = [(world, i) for world, cases in CASES.items() for i in range(len(cases))]


@functools.cache
def results(world: int) -> list[list[Any]] | str:
    """One spawn for each number of ranks."""
    try:
        return run_ranks(run_cases, world, (CASES[world],))
    except RuntimeError as error:
        return str(error)


def outcomes(world: int, index: int) -> tuple[Work, Layout, list[dict[str, Any]]]:
    """What every rank gave."""
    everyone = results(world)
    assert not isinstance(everyone, str), everyone
    found = [rank[index] for rank in everyone]
    for outcome in found:
        assert not isinstance(outcome, str), outcome
    return *CASES[world][index], found


cases = pytest.mark.parametrize(
    ("world", "index"), NAMED, ids=[f"w{w}-{CASES[w][i][0]}-{CASES[w][i][1]}" for w, i in NAMED]
)


@cases
def test_replicas_equal_models_that_train_in_turn_in_one_process(world: int, index: int) -> None:
    work, layout, ranks = outcomes(world, index)
    if work.inner == "sgd":
        for outcome in ranks:
            for name, weight in outcome["weights"].items():
                assert relative(weight, together(work)["weights"][name]) < 1e-5, name
        return
    expected = emulate(work, parts_of(ranks) if work.streams else ())
    size = layout.shard
    for replica in range(work.replicas):
        here = ranks[replica * size : (replica + 1) * size]
        losses = [sum(rank["losses"][step] for rank in here) for step in range(work.steps)]
        assert losses == pytest.approx([row[replica] for row in expected["losses"]], rel=1e-5)
        for outcome in here:
            assert outcome["norms"] == pytest.approx([row[replica] for row in expected["norms"]], rel=1e-5)
    for outcome in ranks:
        for name, weight in outcome["weights"].items():
            assert relative(weight, expected["weights"][name]) < 1e-5, name


@cases
def test_nothing_crosses_between_replicas_between_meetings_and_then_what_the_formula_says(
    world: int, index: int
) -> None:
    work, _, ranks = outcomes(world, index)
    across = ("dp_replicate", "world", "dp", "data", "control")
    for outcome in ranks:
        by_fragment = [2 * (work.replicas - 1) * 4 * numel // work.replicas for _, numel in outcome["fragments"]]
        assert all(by_fragment) and sum(numel for _, numel in outcome["fragments"]) == outcome["numel"]
        for step in range(1, work.steps + 1):
            sent = {(op, axis): n for (op, axis), n in outcome["sent"][step - 1].items() if axis in across and n}
            starting = sum(by_fragment[p] for p in work.starting(step))
            if (
                step > 1
            ):  # the first backward agrees on orders by small objects within the replica, which are not counted
                assert outcome["foreign"][step - 1] == 0
            assert sent == ({("all_reduce", "dp_replicate"): starting} if starting else {}), step


@cases
def test_bytes_at_rest_and_between_replicas_are_what_the_plan_says(world: int, index: int) -> None:
    work, _, ranks = outcomes(world, index)
    for outcome in ranks:
        for found, planned in outcome["held"]:
            assert found == planned
        meeting = 2 * (work.replicas - 1) * 4 * outcome["numel"] // work.replicas
        _, nbytes = outcome["planned"]["all_reduce"]
        assert nbytes == pytest.approx(meeting / work.every, abs=1)
