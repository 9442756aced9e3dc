"""Process groups on GPUs: what torch is asked for when a mesh is made, recorded on one rank of four."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dist import mesh
from hf_dist.mesh import build_mesh

WORLD, RANK = 4, 1
GPU = torch.device("cuda", RANK)


class Distributed:
    """Takes the place of `torch.distributed` in `mesh.py`."""

    def __init__(self) -> None:
        self.ready = False
        self.backend = ""
        self.calls: list[tuple[str, Any]] = []
        options = lambda **given: SimpleNamespace(**given)  # noqa: E731
        self.distributed_c10d = SimpleNamespace(ProcessGroupNCCL=SimpleNamespace(Options=options))

    def init_process_group(self, **given: Any) -> None:
        self.ready, self.backend = True, given["backend"]
        self.calls.append(("init", given))

    def new_group(self, ranks: list[int], **given: Any) -> Any:
        group = SimpleNamespace(ranks=ranks, **given)
        self.calls.append(("group", group))
        return group

    def get_backend(self, group: Any = None) -> str:
        return self.backend if group is None else group.backend

    def is_initialized(self) -> bool:
        return self.ready

    def get_world_size(self) -> int:
        return WORLD

    def get_rank(self) -> int:
        return RANK

    def all_gather_object(self, into: list[Any], item: Any) -> None:
        into[:] = [item] * WORLD

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> None:
        self.calls.append(("used", group))

    def barrier(self, device_ids: Any = None) -> None:
        self.calls.append(("barrier", device_ids))

    def destroy_process_group(self, group: Any = None) -> None:
        self.ready = self.ready and group is not None
        self.calls.append(("destroyed", group))

    def of(self, name: str) -> list[Any]:
        return [what for call, what in self.calls if call == name]


@pytest.fixture
def torch_distributed(chosen: list[Any], monkeypatch: pytest.MonkeyPatch) -> Distributed:
    model = Distributed()
    place = {"RANK": RANK, "LOCAL_RANK": RANK, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    zeros = torch.zeros
    monkeypatch.setattr(mesh, "dist", model)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: zeros(*shape, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: model.calls.append(("synchronized", device)))
    return model


def test_communicators_are_made_with_the_mesh_and_not_in_the_first_backward(torch_distributed: Distributed) -> None:
    made = build_mesh(device="cuda", timeout=timedelta(minutes=3))
    assert [given.get("device_id") for given in torch_distributed.of("init")] == [GPU]
    groups = torch_distributed.of("group")
    on_gpu = [g for g in groups if g.backend == "nccl"]
    assert len(on_gpu) == 3 and all(g.device_id == GPU for g in on_gpu)
    assert all(not hasattr(g, "device_id") for g in groups if g.backend == "gloo")
    names = [name for name, _ in torch_distributed.calls]
    assert torch_distributed.of("used") == on_gpu, "each once, in the order in which all ranks made them"
    assert names[-2:] == ["synchronized", "barrier"]
    assert made.shard.group is not made.shard.reduce_group


def test_gathers_and_reductions_go_before_other_kernels(torch_distributed: Distributed) -> None:
    made = build_mesh(device="cuda", timeout=timedelta(minutes=3))
    urgent = [g for g in torch_distributed.of("group") if hasattr(g, "pg_options")]
    assert urgent == [made.shard.group, made.shard.reduce_group]
    for group in urgent:
        assert group.pg_options.is_high_priority_stream is True
        assert group.pg_options._timeout == timedelta(minutes=3)
    assert urgent[0].pg_options is not urgent[1].pg_options, "torch writes into them"


def test_on_a_cpu_torch_is_asked_for_what_it_was(
    torch_distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_leave_in_order", lambda: None)
    build_mesh(device="cpu", timeout=timedelta(minutes=3))
    assert torch_distributed.of("init") == [{"backend": "gloo", "timeout": timedelta(minutes=3)}]
    assert all(set(vars(g)) == {"ranks", "timeout", "backend"} for g in torch_distributed.of("group"))
    assert not torch_distributed.of("used")


def test_communicators_end_when_the_gpu_is_done_with_them(torch_distributed: Distributed) -> None:
    build_mesh(device="cuda")
    torch_distributed.calls.clear()
    mesh.leave_job()
    assert torch_distributed.calls == [("barrier", [RANK]), ("synchronized", GPU), ("destroyed", None)]
    mesh.leave_job()
    assert len(torch_distributed.calls) == 3
