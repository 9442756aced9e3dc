"""What is said of machines, of what crosses between them, and of the variables that matter on GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dist.dist import network
from hf_dist.dist.axes import Axes
from hf_dist.dist.mesh import MeshAxis, ParallelMesh, build_mesh
from hf_dist.engine import report
from hf_dist.sharding.precision import Precision


def mesh_on(hosts: list[str], shard: int | None = None) -> ParallelMesh:
    """As rank 0 of a job on these machines sees it."""
    alone, axes = build_mesh(device="cpu"), Axes.of(len(hosts), shard=shard)
    views = {name: MeshAxis(name, axes.size(name), 0, None) for name in ("world", "dp", "shard")}
    return replace(alone, axes=axes, hosts=tuple(hosts), views=views, backend="gloo")


BLOCKS = ["a"] * 4 + ["b"] * 4
DEALT = ["a", "b"] * 4


@pytest.mark.parametrize(
    ("hosts", "shard", "said"),
    [
        (
            BLOCKS,
            None,
            ["2 machines with 4 ranks each", "dp_shard: 8 ranks on 2 machines; gathers and reductions cross"],
        ),
        (BLOCKS, 4, ["dp_shard: 4 ranks on one machine"]),
        (DEALT, 4, ["dp_shard: 4 ranks on 2 machines", "not neighbours: number them machine by machine"]),
        (["a", "a", "b"], None, ["2 machines with 1 x 1, 1 x 2 ranks"]),
    ],
    ids=["over_all", "within_a_machine", "dealt_round_robin", "unequal"],
)
def test_the_report_says_whether_shards_cross_machines(hosts: list[str], shard: int | None, said: list[str]) -> None:
    text = "\n".join(network.describe(mesh_on(hosts, shard)))
    for part in said:
        assert part in text
    assert ("not neighbours" in text) is (hosts is DEALT)


def test_nothing_is_said_on_one_machine_without_gpus() -> None:
    assert network.describe(mesh_on(["a"] * 4)) == []


def test_the_report_says_what_travels_between_machines() -> None:
    def lines(**dtypes: torch.dtype) -> str:
        return "\n".join(report._network(SimpleNamespace(mesh=mesh_on(BLOCKS), precision=Precision(**dtypes))))  # type: ignore[arg-type]

    assert "communication_data_type" in lines(compute=torch.bfloat16)
    assert "communication_data_type" not in lines(compute=torch.bfloat16, reduce=torch.bfloat16)
    assert "communication_data_type" not in lines()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh over NCCL that was never made."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    return replace(mesh_on(["a"] * 2), device=torch.device("cuda", 0), backend="nccl")


def test_on_gpus_nccl_its_interface_and_cudas_settings_are_named(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    said = "\n".join(network.describe(on_gpu))
    for part in (
        "1 machine, 2 ranks", "NCCL 2.27.3, first contact over ", "expandable_segments off (PYTORCH_CUDA_ALLOC_CONF=",
        "CUDA_DEVICE_MAX_CONNECTIONS 1",
    ):  # fmt: skip
        assert part in said, said
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    said = "\n".join(network.describe(on_gpu))
    for part in (
        "over ib0 (NCCL_SOCKET_IFNAME)",
        "expandable_segments on",
        "CUDA_DEVICE_MAX_CONNECTIONS unset (8)",
    ):
        assert part in said, said


def test_memory_beside_tensors_is_measured_where_there_is_a_gpu(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000_000_000, 10_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500_000_000)
    sharded: Any = SimpleNamespace(mesh=on_gpu, precision=Precision())
    assert "1.5 GB of the GPU are used outside of tensors" in "\n".join(report._network(sharded))


def test_ranks_know_the_machine_of_each() -> None:
    mesh = mesh_on(DEALT, 4)
    assert mesh.ranks_by_host() == {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}
    assert mesh.hosts_along("shard") == 2
    assert build_mesh(axes=partial(Axes.of), device="cpu").hosts_along("shard") == 1
