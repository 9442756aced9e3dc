"""How often ranks ask each other whether one was told to stop."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.hf import stop_signal
from hf_dist.hf.stop_signal import StopSignal


class Ring:
    """Takes the place of the all-reduce; `others` is what the other ranks bring. The clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.now, self.others = 0, 0.0, torch.zeros(2)
        monkeypatch.setattr(collectives, "all_reduce", self.all_reduce)
        monkeypatch.setattr(stop_signal.time, "monotonic", lambda: self.now)

    def all_reduce(self, axis: MeshAxis, tensor: torch.Tensor, op: str) -> Any:
        self.asked += 1
        torch.maximum(tensor, self.others, out=tensor)
        return collectives.Handle([])


def calls(stop: StopSignal, ring: Ring, count: int, seconds: float = 0.1) -> list[int]:
    """The answers of as many microbatches."""
    answers = []
    for _ in range(count):
        ring.now += seconds
        answers.append(stop.agreed())
    return answers


@pytest.mark.parametrize("world", [2, 64])
def test_few_ranks_ask_for_every_microbatch(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    stop = StopSignal(MeshAxis("control", world, 0, None))
    assert calls(stop, ring, 10) == [0] * 10
    assert ring.asked == 10


def test_thousands_of_ranks_rest_between_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    stop = StopSignal(MeshAxis("control", 4096, 0, None))
    assert not any(calls(stop, ring, 400))  # 40 seconds
    assert 15 < ring.asked < 25, "every two seconds"
    stop._note(signal.SIGTERM, None)
    answers = calls(stop, ring, 60)
    assert signal.SIGTERM in answers and answers.index(signal.SIGTERM) < 50, "heard of within five seconds"


def test_the_other_ranks_rest_as_long_as_rank_0_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    ring.others = torch.tensor([0.0, 3.0])
    stop = StopSignal(MeshAxis("control", 4096, 7, None))
    calls(stop, ring, 1 + 1 + 3 + 1 + 3 + 1)
    assert ring.asked == 4
