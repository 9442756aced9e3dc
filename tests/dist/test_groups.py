"""Groups as torch makes them: what that asks of the store, at any number of ranks, and gloo's connections."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

import hf_dist
from hf_dist.config import axes_of, load_config, resolve_without_trainer
from hf_dist.dist import collectives, groups
from hf_dist.dist.axes import Axes
from hf_dist.dist.groups import num_groups
from hf_dist.dist.mesh import ParallelMesh, build_mesh
from hf_dist.parallel.pipeline.p2p import make_channels
from hf_dist.planning.overhead import groups_after_mesh, num_channels
from hf_dist.planning.planner import Planner, Workload
from tests.covering import some_of
from tests.harness import run_ranks
from tests.parallel.tensor.on_ranks import HIDDEN, llama


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


COMMUNICATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": ({"zero_optimization": {"stage": 3}}, {}),
    "second copy": ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, {}),
    "two hops": ({"hf_dist": {"wires": {"gradients": "int8", "machine": 2}}}, {}),
    "copies": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, {}),
    "stages": ({"pipeline": {"stages": 4}}, {}),
    "tied over stages": ({"pipeline": {"stages": 4}}, {"tie_word_embeddings": True}),
    "tied over two stages": ({"pipeline": {"stages": 2}}, {"tie_word_embeddings": True}),
    "several stages per rank": ({"pipeline": {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}}, {}),
    "heads of keys between neighbours": ({"tensor_parallel": {"autotp_size": 4}}, {}),
    "slices of stages": ({"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}, {}),
    "sequences both ways": ({"sequence_parallel_size": 4, "hf_dist": {"sequence_parallel": [2, 2]}}, {}),
    "sequences in a ring": ({"sequence_parallel_size": 2, "hf_dist": {"sequence_parallel": "ring"}}, {}),
    "copies that train alone": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "local_sgd": {"every": 2}}, {}
    ),
    "slices of copies that train alone": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 1}, "tensor_parallel": {"autotp_size": 2},
         "local_sgd": {"every": 2}}, {},
    ),
}  # fmt: skip
"""Config, and fields of the model."""
COMMUNICATORS = some_of(
    COMMUNICATORS,
    *("second copy", "two hops", "tied over stages", "heads of keys between neighbours", "sequences both ways"),
    "slices of copies that train alone",
)  # each kind of group once


def _completed(more: dict[str, Any]) -> dict[str, Any]:
    own = {"stall_report_seconds": 0, "check_load": False, **more.get("hf_dist", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, **more, "hf_dist": own}
    return {**config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def communicators(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Case -> (groups, channels) that this rank of a job has on the device, the default group included."""
    import hf_dist

    found = {}
    for case, (more, fields) in COMMUNICATORS.items():
        engine = hf_dist.initialize(llama(num_hidden_layers=4, **fields), config=_completed(more), device="cpu")
        labels = [name.split(":")[2] for name, count in engine.mesh.lease.names.items() for _ in range(count)]
        of_host = sum(label in ("control", "calls", "background") for label in labels)
        channels = sum(label[:2] in ("F ", "B ") for label in labels)
        found[case] = len(labels) - of_host - channels + 1, channels
    return found


@functools.cache
def made() -> list[dict[str, tuple[int, int]]]:
    return run_ranks(communicators, 4, timeout=120)


TABLE = (
    ("dp 8", 8, {}, 4),
    ("HSDP 2 x 4", 8, {"shard": 4}, 5),
    ("ep 8", 8, {"ep": 8}, 4),
    ("ep 4 of 8", 8, {"ep": 4}, 7),
    ("tp 2, dp 4", 8, {"tp": 2}, 6),
    ("cp 2, dp 4", 8, {"cp": 2}, 6),
    ("pp 2, tp 2, dp 2", 8, {"pp": 2, "tp": 2}, 8),
    ("pp 2, cp 2, tp 2, dp 2", 16, {"pp": 2, "cp": 2, "tp": 2}, 11),
)


def test_the_readme_says_how_many_communicators_a_layout_has() -> None:
    text = (Path(hf_dist.__file__).parent / "dist" / "README.md").read_text(encoding="utf-8")
    for name, world, sizes, count in TABLE:
        assert num_groups(Axes.of(world, **sizes)) == count, name
        assert f"| {name} | {count} |" in text


@pytest.mark.parametrize("case", COMMUNICATORS)
def test_the_plan_counts_the_communicators_that_are_made(case: str) -> None:
    more, fields = COMMUNICATORS[case]
    loaded = load_config(_completed(more))
    config = resolve_without_trainer(loaded, data_ranks=axes_of(loaded, 4).size("data"), hidden_size=HIDDEN)
    with torch.device("meta"):
        model = llama(num_hidden_layers=4, **fields)

    def number(config: Any, axes: Axes, of_model: int) -> int:
        return num_groups(axes) + groups_after_mesh(config, axes) + of_model

    planner = Planner(model, 4, Workload(2, 16), None, number)
    planned = [planner.plan_rank(config, stage).beside for stage in range(config.pipeline.stages)]
    stage_of = [axes_of(config, 4).coordinate("pp", rank) for rank in range(4)]
    assert [groups for groups, _ in [found[case] for found in made()]] == [planned[stage] for stage in stage_of]
    assert max(channels for _, channels in [found[case] for found in made()]) == num_channels(config)
