"""Pipelines over a model of NCCL's transfers (`pairs.py`), with the real schedules, interpreter and transport."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hf_dist.parallel.pipeline import (
    P2PTransport,
    ScheduleRun,
    add_communication,
    forward_only,
    make_schedule,
    p2p,
)
from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule
from hf_dist.parallel.pipeline.communication import Channel, channel_of
from hf_dist.parallel.pipeline.p2p import ChannelEnds
from hf_dist.parallel.pipeline.split import StageOutput
from tests.gpu_sim.pairs import Nccl

SCHEDULES = [
    ("1f1b", 2, 4, 1), ("1f1b", 4, 8, 1), ("gpipe", 2, 4, 1), ("zb_h1", 3, 4, 1), ("interleaved_1f1b", 2, 4, 2),
]  # fmt: skip
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


class Factors:
    """Every stage multiplies by its weight; the number travels in `parts` tensors."""

    recomputes = False

    def __init__(self, num_stages: int, parts: int) -> None:
        self.last, self.parts = num_stages - 1, parts
        self.weights = [torch.full((1,), 1.0 + stage, requires_grad=True) for stage in range(num_stages)]

    def forward(self, stage: int, run: Any, given: Sequence[torch.Tensor]) -> StageOutput:
        value = torch.stack(list(given)).sum(0) if given else torch.ones(3)
        value = value * self.weights[stage]
        if stage == self.last:
            return StageOutput(None, value.sum())
        return StageOutput(tuple(value / self.parts for _ in range(self.parts)))


class Traced(P2PTransport):
    """Checks, at each receive that is posted, that the sends which it depends on were issued; counts what is posted ahead."""

    most_waiting = 0

    def follow(self, schedule: Schedule, rank: int) -> None:
        self.actions = schedule.ranks[rank]
        self.issued: set[Action] = set()
        self.too_early: list[str] = []
        self.waiting: Counter[Channel] = Counter()
        self.turns: dict[tuple[Channel, bool], deque[Action]] = defaultdict(deque)
        for action in self.actions:
            if (channel := channel_of(schedule, action)) is not None:
                self.turns[channel, action.kind in SENDS].append(action)

    def send(self, channel: Channel, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.issued.add(self.turns[channel, True].popleft())
        super().send(channel, key, tensors)

    def post(self, channel: Channel, key: Any, specs: Any) -> None:
        action = self.turns[channel, False].popleft()
        before = self.actions[: self.actions.index(action)]
        needed = [a for a in before if a.kind in SENDS and a.microbatch == action.microbatch]
        self.too_early += [f"{action} before {a}" for a in needed if a not in self.issued]
        self.waiting[channel] += 1
        self.most_waiting = max(self.most_waiting, self.waiting[channel])
        super().post(channel, key, specs)

    def receive(self, channel: Channel, key: Any, specs: Any) -> list[torch.Tensor]:
        received = super().receive(channel, key, specs)
        self.waiting[channel] -= 1
        return received


Outcome = tuple[Factors, Traced]


def run(schedule: Schedule, parts: int, nccl: Nccl, steps: int = 2) -> list[Any]:
    """By rank: its stages and its transport after some steps, or the error."""
    size = schedule.num_ranks
    ring = schedule.num_stages > size
    pairs = [(i, (i + 1) % size) for i in range(size if ring else size - 1)]
    every = [Channel(a, b, "F") for a, b in pairs] + [Channel(b, a, "B") for a, b in pairs]
    count = schedule.num_microbatches

    def job(rank: int) -> Outcome:
        mine: Any = {c: ChannelEnds(str(c), c.source, c.target) for c in every if rank in (c.source, c.target)}
        transport = Traced(mine, torch.device("cpu"))
        getattr(transport, "connect", lambda: None)()
        staged: Any = Factors(schedule.num_stages, parts)
        for _ in range(steps):
            transport.follow(schedule, rank)
            ScheduleRun(staged, schedule, rank, transport).run([{"x": torch.zeros(1)}] * count, lambda m, b: None)
        return staged, transport

    return nccl.on_ranks(size, job)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    model = Nccl()
    monkeypatch.setattr(p2p, "dist", model)
    logging.disable(logging.CRITICAL)  # a grid for each rank that hangs
    yield model
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("name", "ranks", "count", "virtual"), SCHEDULES, ids=[s[0] + str(s[1]) for s in SCHEDULES])
def test_no_pipeline_hangs_in_its_first_window(
    name: str, ranks: int, count: int, virtual: int, parts: int, nccl: Nccl
) -> None:
    schedule = add_communication(make_schedule(name, ranks, count, virtual))
    outcomes = run(schedule, parts, nccl)
    assert not [o for o in outcomes if isinstance(o, BaseException | str)]
    product = float(torch.tensor([1.0 + s for s in range(schedule.num_stages)]).prod())
    for rank, (staged, _) in enumerate(outcomes):
        for stage in schedule.stages_of(rank):  # 2 steps, 3 elements
            assert float(staged.weights[stage].grad) == pytest.approx(2 * count * 3 * product / (1.0 + stage), rel=1e-6)
    groups = [group for group, _ in nccl.communicators]
    assert len(groups) == len(set(groups)), "each has buffers on the device"
    for _, transport in outcomes:
        assert transport.most_waiting == 1, "each that waits holds a part of the device"
        assert transport.too_early == []


def test_evaluation_alone_connects_too(nccl: Nccl) -> None:
    outcomes = run(add_communication(forward_only(2, 2, 1)), 1, nccl)
    assert not [o for o in outcomes if isinstance(o, BaseException | str)]
