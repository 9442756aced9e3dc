"""Groups as torch makes them: what that asks of the store, at any number of ranks, and gloo's connections."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from hf_dist import collectives, groups
from hf_dist.axes import Axes
from hf_dist.mesh import ParallelMesh, build_mesh
from hf_dist.pipeline.p2p import make_channels
from tests.harness import run_ranks


class CountingStore(dist.Store):
    """Answers as if every other rank had done the same; counts what this one asks."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.values: dict[str, Any] = {}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self.values[key] = value

    def get(self, key: str) -> Any:
        self.requests["get"] += 1
        return self.values[key]

    def add(self, key: str, number: int) -> int:
        self.requests["add"] += 1
        return self.world

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.requests["wait"] += 1

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)


@contextmanager
def rank_of(world: int, rank: int, **given: Any) -> Iterator[CountingStore]:
    """This process is one rank of torch's fake group."""
    assert fake_pg  # its import makes torch know the backend
    store = CountingStore(world)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world, **given)
    store.requests.clear()
    try:
        yield store
    finally:
        dist.destroy_process_group()


def set_up(**axes: int) -> tuple[ParallelMesh, dict[Any, Any]]:
    """The mesh and a pipeline's channels."""
    mesh = build_mesh(device="cpu", axes=partial(Axes.of, **axes), facts={"a": "b"})
    channels = make_channels(mesh.axes.lines("pp"), ring=False, rank=mesh.world.rank, group_of=mesh.groups.one_of)
    return mesh, channels


@pytest.mark.parametrize("pp", [1, 8])
def test_set_up_asks_the_store_as_little_at_4096_ranks_as_at_128(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # every group costs something then
    asked = {}
    for world in (128, 4096):
        with rank_of(world, world // 2) as store:
            mesh, channels = set_up(pp=pp, shard=8)
            made = dist.distributed_c10d._world.pg_names
            assert len(made) == 1 + len(mesh.lease.groups), "the default one, and those that end with the mesh"
            assert len(channels) == (4 if pp > 1 else 0)
            assert all(mesh.world.rank in dist.get_process_group_ranks(group) for group in mesh.lease.groups)
            asked[world] = sum(store.requests.values())
            mesh.lease.groups.clear()
            del mesh, channels
    assert asked[4096] == asked[128] > 0
    assert asked[128] < 100


def talk(rank: int, world: int, late: bool) -> tuple[list[Any], int]:
    """(what control and background carry, open files of this process)"""
    groups.LATE_ABOVE = 1 if late else 64
    mesh = build_mesh(device="cpu", timeout=timedelta(seconds=60))
    number = torch.tensor([float(rank)])
    collectives.all_reduce(mesh.control, number, op="max").wait()
    said: list[Any] = [float(number)]
    for axis in (mesh.control, mesh.background):
        said += [
            collectives.all_gather_object(axis, {"rank": rank}),
            collectives.broadcast_object(axis, rank, source=1),
        ]
        collectives.barrier(axis)
    full = torch.zeros(2 * world)
    full[2 * rank : 2 * rank + 2] = rank
    collectives.all_gather(mesh.shard, full).wait()
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return [*said, full.tolist()], len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_ranks_that_connect_late_say_the_same_with_fewer_connections() -> None:
    at_once, late = (run_ranks(talk, 4, (how,), timeout=120) for how in (False, True))
    expected = [3.0, *2 * [[{"rank": r} for r in range(4)], 1], [float(r) for r in range(4) for _ in range(2)]]
    for found in (at_once, late):
        assert [said for said, _ in found] == [expected] * 4
