"""A rank that makes the others wait is named by the time of its own, with its phase; healthy ranks never are. No processes."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.dist import collectives
from hf_dist.dist.watchdog.own_time import OwnTime
from hf_dist.dist.watchdog.report import Status
from hf_dist.dist.watchdog.slow_rank import SlowRanks
from hf_dist.hf.callbacks import phases

PHASES = {
    "data": "data loader",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer step",
    "other": "callbacks and logging",
}
USUAL = {"core": 0.0, "data": 0.01, "forward_backward": 0.1, "optimizer": 0.02, "other": 0.005}


class Job:
    """Ranks in lockstep whose statuses are sent every five seconds, each at its own moment of them, through JSON."""

    def __init__(self, world: int, seed: int, stages: int = 1) -> None:
        self.draw = random.Random(seed)
        self.times = [OwnTime(5.0) for _ in range(world)]
        self.stages = [rank * stages // world for rank in range(world)]
        self.moments = [self.draw.uniform(0, 5) for _ in range(world)]
        self.said: dict[int, Status] = {}
        self.judge = SlowRanks()
        self.lines: list[str] = []
        self.now = 0.0
        self.step = 0

    def window(self, steps: int, extra: dict[int, dict[str, float]]) -> None:
        """A log window. `extra`: rank -> phase -> seconds more per step."""
        world, owns = len(self.times), []
        self.step += steps
        for rank in range(world):
            own = {
                p: steps * (s * self.draw.uniform(0.95, 1.05) + extra.get(rank, {}).get(p, 0.0))
                for p, s in USUAL.items()
            }
            owns.append(own)
        wall = max(sum(own.values()) for own in owns)
        self.now += wall
        for time, own in zip(self.times, owns, strict=True):
            time.add(self.step, own, wall=wall)
        for rank in range(world):
            if self.now >= self.moments[rank]:
                self.moments[rank] = self.now + 5
                sent = json.loads(json.dumps(Status(rank, "gpu", 100 + rank, totals=self.times[rank].totals).as_dict))
                location = sent.pop("location")
                assert location
                self.said[rank] = Status(rank, **(sent | {"stage": self.stages[rank]}))
                self.lines += self.judge.name(list(self.said.values()), world)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 9), st.data(), st.sampled_from(list(PHASES)), st.sampled_from([1, 4, 50]), st.integers(0, 99))
def test_the_slow_rank_is_named_with_its_phase(world: int, data: Any, phase: str, steps: int, seed: int) -> None:
    slow = data.draw(st.integers(0, world - 1))
    job = Job(world, seed)
    while job.now < 60 or job.step < 6 * steps:
        job.window(steps, {slow: {phase: 0.2}})
    assert job.lines
    for line in job.lines:
        assert re.search(
            rf"rank {slow} \(pid {100 + slow} on gpu\) makes the others wait: 2\.[3-7] of the median for", line
        ), line
        assert f"windows, in: {PHASES[phase]} (steps " in line, line


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 9), st.sampled_from([1, 4, 50]), st.integers(0, 99))
def test_healthy_ranks_are_never_named(world: int, steps: int, seed: int) -> None:
    job = Job(world, seed)
    for number in range(60):  # a window in which one rank was disturbed is no rank that is slow
        job.window(steps, {number % world: {"other": 0.2}} if number % 10 == 0 else {})
    assert job.lines == []


def test_a_rank_without_a_core_is_named_only_after_a_minute() -> None:
    """On a busy machine each rank lacks one in turn; a node with a runaway program is slow for good."""
    job = Job(4, 0)
    for number in range(80):  # each rank for five windows
        job.window(50, {number // 5 % 4: {"core": 0.5}})
    assert job.lines == []
    for _ in range(14):
        job.window(50, {1: {"core": 0.5}})
    (line,) = job.lines
    assert "rank 1 " in line and "for 12 windows, in: waiting for a processor core" in line


def test_it_is_said_ever_more_rarely_and_again_after_a_pause() -> None:
    job = Job(4, 0)
    for slow in (True, False, True):
        for _ in range(30):
            job.window(50, {1: {"data": 0.2}} if slow else {})
    assert [re.findall(r"for (\d+) windows", line)[0] for line in job.lines] == ["3", "6", "12", "24"] * 2


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    job = Job(4, 0, stages=2)
    for _ in range(30):
        job.window(50, {rank: {"forward_backward": 0.1} for rank in (2, 3)})  # the head makes the last stage longer
    assert job.lines == []


def test_time_that_may_hold_waits_counts_alike_for_all_ranks() -> None:
    """On a GPU: a slow loader is what the queue of its rank waits for, and what other ranks wait for in their kernels."""
    judge, times = SlowRanks(), [OwnTime(5.0) for _ in range(4)]
    for step in range(10, 100, 10):
        for rank, time in enumerate(times):
            time.add(step, {"data": 6.0 if rank == 2 else 0.1}, wall=16.0, mixed=10.0 if rank == 2 else 15.9)
    (line,) = judge.name([Status(rank, totals=time.totals) for rank, time in enumerate(times)], 4)
    assert "rank 2 makes the others wait: 1.6 of the median" in line and "in: data loader" in line


def test_the_own_time_of_a_host_is_without_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = SimpleNamespace(wall=0.0, waited=0.0, delayed=0.0, delayed_in_waits=0.0), []
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(collectives, "wait_seconds", lambda: now.waited)
    monkeypatch.setattr(phases.watchdog, "end_window", lambda step, own, **more: told.append((step, own, more)))
    monkeypatch.setattr(phases.host_info, "CoreDelay", lambda: SimpleNamespace(seconds=lambda: now.delayed))
    monkeypatch.setattr(collectives, "waits_for_core", lambda: now.delayed_in_waits)
    clock = phases.HostClock()
    for phase, wall, waited in (("data", 1, 0.25), ("forward_backward", 4, 3), ("pause", 9, 8), ("optimizer", 1, 0)):
        now.wall, now.waited = now.wall + wall, now.waited + waited
        now.delayed, now.delayed_in_waits = (
            now.delayed + 0.75 * (phase != "optimizer"),
            now.delayed_in_waits + 0.25 * waited / 4,
        )
        clock.mark(phase)
    seconds = clock.read()
    clock.tell(7, seconds)
    (told_once,) = told
    step, own, more = told_once
    assert step == 7 and more == {"wall": 15.0}
    assert own == pytest.approx({"data": 0.015625, "forward_backward": 0.4375, "optimizer": 1.0, "core": 1.296875})
    assert seconds["communication_wait"] == 3.25
