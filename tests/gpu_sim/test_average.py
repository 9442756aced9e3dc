"""Means over NCCL, by a stand-in that rounds where it does: sums in the dtype that travels, AVG as a product before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis

PART = 40


class Nccl:
    """All ranks of one group in this process: each call leaves its tensor, the first wait computes for all."""

    ReduceOp = dist.ReduceOp

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[str, list[tuple[torch.Tensor, torch.Tensor, Any]]] = defaultdict(list)

    def get_backend(self, group: Any) -> str:
        return "nccl"

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> Any:
        return self._call("all_reduce", tensor, tensor, op)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, op: Any, group: Any, async_op: bool) -> Any:
        return self._call("reduce_scatter", full, out, op)

    def _call(self, name: str, given: torch.Tensor, out: torch.Tensor, op: Any) -> Any:
        assert given.dtype == out.dtype
        self.calls[name].append((given, out, op))
        return SimpleNamespace(wait=lambda: self._finish(name))

    def _finish(self, name: str) -> None:
        calls, self.calls[name] = self.calls[name], []
        if not calls:
            return
        assert len(calls) == self.size, "a rank is missing"
        total = torch.zeros_like(calls[0][0])
        for given, _, op in calls:
            average = op == dist.ReduceOp.AVG
            total += given * torch.tensor(1.0 / self.size).to(given.dtype) if average else given
        for rank, (_, out, _) in enumerate(calls):
            out.copy_(total if out.shape == total.shape else total.chunk(self.size)[rank])


Started = list[tuple[torch.Tensor, collectives.Handle]]


def axis_of(rank: int, size: int) -> MeshAxis:
    group: Any = object()
    return MeshAxis("dp", size, rank, group, group)


def scattered(given: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What the ranks get of a reduce-scatter, put together."""
    started: Started = []
    for rank, full in enumerate(given):
        out = torch.full((full.numel() // len(given),), -1, dtype=dtype)
        started.append((out, collectives.reduce_scatter(axis_of(rank, len(given)), full.clone(), out)))
    for _, handle in started:
        handle.wait()
    return torch.cat([out for out, _ in started])


def reduced(given: list[torch.Tensor]) -> torch.Tensor:
    """What every rank gets of an all-reduce."""
    started: Started = []
    for rank, full in enumerate(given):
        mine = full.clone()
        started.append((mine, collectives.all_reduce(axis_of(rank, len(given)), mine)))
    for _, handle in started:
        handle.wait()
    assert all(torch.equal(mine, started[0][0]) for mine, _ in started)
    return started[0][0]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Nccl]:
    def begin(size: int) -> Nccl:
        model = Nccl(size)
        monkeypatch.setattr(collectives, "dist", model)
        monkeypatch.setattr(collectives, "_reduce_scatter", model.reduce_scatter)
        return model

    return begin


def whole_numbers(size: int, unit: float, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One tensor for each rank, whose sums are exact in half precision too, and their mean in fp32."""
    given = [unit * (1 + (torch.arange(size * PART) * (3 + rank)) % 17).float() for rank in range(size)]
    return [g.to(dtype) for g in given], torch.stack(given).sum(0) / size


@pytest.mark.parametrize("size", [2, 3, 6, 8])
@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float32, 1.0),
        (torch.bfloat16, 1.0),
        (torch.float16, 4.0),
        (torch.float16, 2.0**-22),  # its smallest values but two bits: a division by 6 before the sum has no room
        (torch.float16, 1024.0),  # of which the sum alone has none
    ],
    ids=["fp32", "bf16", "fp16", "fp16-small", "fp16-large"],
)
def test_the_mean_is_rounded_once(size: int, dtype: torch.dtype, unit: float, nccl: Callable[[int], Nccl]) -> None:
    nccl(size)
    given, mean = whole_numbers(size, unit, dtype)
    torch.testing.assert_close(scattered(given, torch.float32), mean, rtol=1e-6, atol=0)
    if dtype is not torch.float32:  # half a bit each of the sum and of the mean
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(reduced(given).float(), mean, rtol=step, atol=2.0**-25)
        torch.testing.assert_close(scattered(given, dtype).float(), mean, rtol=step, atol=2.0**-25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_group_of_one_rank_asks_nccl_for_nothing(dtype: torch.dtype, nccl: Callable[[int], Nccl]) -> None:
    model = nccl(1)
    given, mean = whole_numbers(1, 1.0, dtype)
    assert torch.equal(scattered(given, torch.float32), mean)
    assert torch.equal(reduced(given).float(), mean)
    assert not model.calls


def test_sums_and_maxima_are_what_they_were(nccl: Callable[[int], Nccl]) -> None:
    model = nccl(3)
    tensor = torch.ones(4, dtype=torch.bfloat16)
    for op, code in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        collectives.all_reduce(axis_of(0, 3), tensor, op)
        assert model.calls["all_reduce"][-1][2] == code
