"""Collectives on one to four ranks: values, and the bytes that the recorder counts."""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import Any

import pytest
import torch

from hf_dist.dist import collectives, comm_counter
from hf_dist.dist.axes import Axes
from hf_dist.dist.mesh import MeshAxis, ParallelMesh, build_mesh
from tests.harness import run_ranks
from tests.sharding.loop import attempt

WORLDS = (1, 2, 3, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PART = 5


def whole(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in bf16, different on each rank."""
    return (torch.arange(size * PART) % 16 + rank).to(dtype)


def all_gather(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    full = torch.full((axis.size * PART,), -1, dtype=dtype)
    full[axis.rank * PART : (axis.rank + 1) * PART] = axis.rank + 1
    handle = collectives.all_gather(axis, full)
    handle.wait()
    handle.wait()
    assert torch.equal(full, torch.arange(1, axis.size + 1).repeat_interleave(PART).to(dtype))
    return "all_gather", (axis.size - 1) * PART * full.element_size()


def several_in_flight(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    """Waited for in another order than they were started."""
    fulls = [torch.full((axis.size * PART,), -1, dtype=dtype) for _ in range(4)]
    for k, full in enumerate(fulls):
        full[axis.rank * PART : (axis.rank + 1) * PART] = 10 * k + axis.rank
    handles = [collectives.all_gather(axis, full) for full in fulls]
    for handle in reversed(handles):
        handle.wait()
    for k, full in enumerate(fulls):
        assert torch.equal(full, (10 * k + torch.arange(axis.size)).repeat_interleave(PART).to(dtype))
    return "all_gather", 4 * (axis.size - 1) * PART * fulls[0].element_size()


def reduce_scatter(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    full = whole(axis.rank, axis.size, dtype)
    out = torch.full((PART,), -1.0)  # wider than what travels
    collectives.reduce_scatter(axis, full, out).wait()
    mean = sum(whole(r, axis.size, torch.float32) for r in range(axis.size)) / axis.size
    torch.testing.assert_close(out, mean[axis.rank * PART :][:PART], rtol=1e-6, atol=0)
    assert torch.equal(full, whole(axis.rank, axis.size, dtype)), "the input is not a place to write"
    return "reduce_scatter", (axis.size - 1) * PART * full.element_size()


def reduce_scatter_in_its_dtype(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    full, out = whole(axis.rank, axis.size, dtype), torch.empty(PART, dtype=dtype)
    collectives.reduce_scatter(axis, full, out).wait()
    mean = sum(whole(r, axis.size, torch.float32) for r in range(axis.size)) / axis.size
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]  # one rounding of the sum, one of the mean
    torch.testing.assert_close(out.float(), mean[axis.rank * PART :][:PART], rtol=tolerance, atol=0)
    return "reduce_scatter", (axis.size - 1) * PART * full.element_size()


def sum_beyond_half_precision(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    """1024 and some ones: in whichever order bf16 adds them, it loses some, and the result is wider."""
    full, out = torch.full((axis.size * PART,), 1.0 if axis.rank else 1024.0, dtype=dtype), torch.empty(PART)
    collectives.reduce_scatter(axis, full, out, op="sum").wait()
    assert torch.equal(out, torch.full((PART,), 1024.0 + axis.size - 1))
    return "reduce_scatter", (axis.size - 1) * PART * full.element_size()


def all_reduce(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    for op, expected in (("sum", axis.size * (axis.size + 1) / 2), ("max", axis.size), ("mean", (axis.size + 1) / 2)):
        tensor = torch.full((7,), axis.rank + 1.0, dtype=dtype)
        handle = collectives.all_reduce(axis, tensor, op=op)
        handle.wait()
        handle.wait()
        assert torch.equal(tensor, torch.full((7,), expected, dtype=dtype)), op
    return "all_reduce", 3 * (2 * (axis.size - 1) * 7 * torch.empty(0, dtype=dtype).element_size() // axis.size)


def broadcast(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    for source in range(axis.size):
        tensor = torch.full((6,), float(axis.rank), dtype=dtype)
        collectives.broadcast(axis, tensor, source)
        assert torch.equal(tensor, torch.full((6,), float(source), dtype=dtype))
    return "broadcast", 6 * torch.empty(0, dtype=dtype).element_size()  # once, as the source


def empty(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    nothing = torch.empty(0, dtype=dtype)
    collectives.all_gather(axis, nothing).wait()
    collectives.reduce_scatter(axis, nothing, torch.empty(0)).wait()
    collectives.all_reduce(axis, nothing).wait()
    return "all_gather", 0


def all_to_all(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    sent = [(axis.rank + to) % 3 for to in range(axis.size)]  # 0, 1 or 2 rows, other numbers on each rank
    received = [(source + axis.rank) % 3 for source in range(axis.size)]
    rows = torch.cat([torch.full((n, 2), 10.0 * axis.rank + to) for to, n in enumerate(sent)]).to(dtype)
    out = torch.empty(sum(received), 2, dtype=dtype)
    collectives.all_to_all(axis, rows, out, sent, received).wait()
    wanted = torch.cat([torch.full((n, 2), 10.0 * source + axis.rank) for source, n in enumerate(received)]).to(dtype)
    assert torch.equal(out, wanted)
    return "all_to_all", (len(rows) - sent[axis.rank]) * 2 * rows.element_size()


def objects(axis: MeshAxis, dtype: torch.dtype) -> tuple[str, int]:
    assert collectives.all_gather_object(axis, {"rank": axis.rank}) == [{"rank": r} for r in range(axis.size)]
    collectives.barrier(axis)
    return "all_gather", 0


OPERATIONS = (
    all_gather, several_in_flight, reduce_scatter, reduce_scatter_in_its_dtype, sum_beyond_half_precision, all_reduce,
    broadcast, empty, objects, all_to_all,
)  # fmt: skip


def check(axis: MeshAxis, operation: Any, dtype: torch.dtype) -> None:
    """Values inside, bytes here; what runs after `record()` is not counted."""
    with comm_counter.record() as log, comm_counter.record() as second:
        op, nbytes = operation(axis, dtype)
    expected = nbytes if axis.group is not None else 0
    assert log.nbytes(op) == log.nbytes() == second.nbytes() == expected
    assert all(entry.axis == axis.name for entry in log.entries)
    count = log.count(op)
    operation(axis, dtype)
    assert log.count(op) == count


def hybrid(mesh: ParallelMesh) -> None:
    """Two axes: shards are neighbours, replicas are apart."""
    assert (mesh.shard.size, mesh.views["dp_replicate"].size) == (2, 2)
    assert mesh.dp.rank == 2 * mesh.views["dp_replicate"].rank + mesh.shard.rank
    assert collectives.all_gather_object(mesh.shard, mesh.dp.rank) == [
        2 * mesh.views["dp_replicate"].rank + k for k in (0, 1)
    ]
    assert collectives.all_gather_object(mesh.views["dp_replicate"], mesh.dp.rank) == [
        mesh.shard.rank,
        mesh.shard.rank + 2,
    ]


CUTS = [{"pp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"ep": 2}, {"cp": 2, "shard": 2}, {"cp": 4, "ep": 2}]


def views(rank: int, world: int) -> None:
    """Every axis and view has the ranks of this rank's line, by coordinate; those of the same lines share a group."""
    for sizes in CUTS:
        mesh = build_mesh(axes=partial(Axes.of, **sizes), device="cpu")
        for name, axis in mesh.views.items():
            line = mesh.axes.line(name, rank)
            assert collectives.all_gather_object(axis, rank) == line, (sizes, name)
            assert (axis.size, axis.rank) == (len(line), line.index(rank)), (sizes, name)
            assert (axis.group is None) == (axis.size == 1)
    # all ranks; shards twice; control, calls and background
    mesh = build_mesh(device="cpu")
    assert len(mesh.lease.groups) == 6


def run(rank: int, world: int) -> dict[Any, Any]:
    """Every operation and dtype on the axis of all ranks."""
    mesh = build_mesh(device="cpu")
    found: dict[Any, Any] = {
        (operation.__name__, name): attempt(lambda o=operation, d=dtype: check(mesh.shard, o, d))
        for operation in OPERATIONS
        for name, dtype in DTYPES.items()
    }
    found["axes"] = (
        attempt(lambda: hybrid(build_mesh(axes=partial(Axes.of, shard=2), device="cpu"))) if world == 4 else None
    )
    found["views"] = attempt(lambda: views(rank, world)) if world == 4 else None
    found["divisor"] = attempt(lambda: build_mesh(axes=partial(Axes.of, shard=world + 1), device="cpu"))
    found["settings"] = attempt(lambda: build_mesh(device="cpu", facts={"stage": "3", "lr": str(rank)}))
    return found


@functools.cache
def results(world: int) -> list[dict[Any, Any]] | str:
    """One spawn per number of ranks."""
    try:
        return run_ranks(run, world, timeout=240)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_values_and_bytes(world: int, name: str, operation: Any) -> None:
    ranks = results(world)
    assert not isinstance(ranks, str), ranks
    for found in ranks:
        assert found[operation.__name__, name] is None, found[operation.__name__, name]


@pytest.mark.parametrize("world", WORLDS)
def test_meshes(world: int) -> None:
    ranks = results(world)
    assert not isinstance(ranks, str), ranks
    for found in ranks:
        assert found["axes"] is None, found["axes"]
        assert found["views"] is None, found["views"]
        assert "is not a divisor" in found["divisor"]
        if world > 1:
            assert "lr: 0 on rank 0, 1 on rank 1" in found["settings"]
            assert "stage" not in found["settings"].split("different settings")[1]


def drop_at_once(rank: int, world: int) -> int:
    """Meshes that nobody keeps"""
    return len([build_mesh().world.size for _ in range(10)])


def test_a_mesh_that_is_dropped_at_once_leaves_no_rank_in_the_middle_of_making_it() -> None:
    assert run_ranks(drop_at_once, 4, timeout=120) == [10] * 4


def leave_early(rank: int, world: int) -> list[float]:
    """Rank 0 drops its mesh while the gather that it has started is still on its way"""
    full = torch.full((1 << 20,), float(rank))
    mesh = build_mesh()
    if rank:
        time.sleep(1)
    handle = collectives.all_gather(mesh.shard, full)
    if rank:
        handle.wait()
    del mesh, handle
    return full.view(world, -1)[:, -1].tolist()


def test_groups_that_end_wait_for_what_is_on_its_way() -> None:
    assert run_ranks(leave_early, 2, timeout=60) == [[0.0, 1.0]] * 2
