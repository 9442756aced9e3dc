"""Process groups on GPUs: what torch is asked for when a mesh is made, recorded on one rank of four, or of 4096."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

from hf_dist import DistAccelerator
from hf_dist.dist import groups, mesh, rendezvous
from hf_dist.dist.axes import Axes
from hf_dist.dist.groups import GroupLease, GroupMaker
from hf_dist.dist.mesh import build_mesh
from hf_dist.parallel.pipeline.p2p import make_channels

WORLD, RANK = 4, 1
GPU = torch.device("cuda", RANK)


class Distributed:
    """Takes the place of `torch.distributed` where groups are made."""

    def __init__(self, world: int = WORLD, rank: int = RANK) -> None:
        self.ready = False
        self.world, self.rank = world, rank
        self.backend = ""
        self.calls: list[tuple[str, Any]] = []
        self.default = SimpleNamespace(bound_device_id=None)
        options = lambda **given: SimpleNamespace(**given, config=SimpleNamespace(max_ctas=32))  # noqa: E731
        self.distributed_c10d = SimpleNamespace(
            ProcessGroupNCCL=SimpleNamespace(Options=options),
            _get_default_group=lambda: self.default,
            _process_group_name=lambda ranks, use_hashed_name: "torch's own",
        )

    def init_process_group(self, **given: Any) -> None:
        self.ready, self.backend = True, given["backend"]
        self.calls.append(("init", given))

    def new_group(self, ranks: list[int], **given: Any) -> Any:
        if given.pop("use_local_synchronization", False):
            assert self.rank in ranks, "of the others torch says that there is none"
        else:
            self.calls.append(("by all", ranks))
        name = self.distributed_c10d._process_group_name(ranks, True)
        group = SimpleNamespace(ranks=ranks, group_name=name, **given)
        self.calls.append(("group", group))
        return group

    def get_backend(self, group: Any = None) -> str:
        return self.backend if group is None else group.backend

    def is_initialized(self) -> bool:
        return self.ready

    def get_world_size(self) -> int:
        return self.world

    def get_rank(self) -> int:
        return self.rank

    def all_gather_object(self, into: list[Any], item: Any) -> None:
        into[:] = [item] * self.world

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
    for module in (mesh, groups, rendezvous):
        monkeypatch.setattr(module, "dist", model)
    place = {"RANK": RANK, "LOCAL_RANK": RANK, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: zeros(*shape, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: model.calls.append(("synchronized", device)))
    return model


def test_communicators_are_made_with_the_mesh_and_not_in_the_first_backward(torch_distributed: Distributed) -> None:
    made = build_mesh(device="cuda", timeout=timedelta(minutes=3))
    assert [given.get("device_id") for given in torch_distributed.of("init")] == [None], "else NCCL would split it"
    made_groups = torch_distributed.of("group")
    on_gpu = [g for g in made_groups if g.backend == "nccl"]
    assert len(on_gpu) == 3 and all(g.device_id == GPU for g in on_gpu)
    assert all(not hasattr(g, "device_id") for g in made_groups if g.backend == "gloo")
    names = [name for name, _ in torch_distributed.calls]
    assert torch_distributed.of("used") == on_gpu, "each once, in the order in which all ranks made them"
    assert names[-2:] == ["synchronized", "barrier"]
    assert made.shard.group is not made.shard.reduce_group


def test_groups_that_are_made_after_the_mesh_are_used_once_before_training(torch_distributed: Distributed) -> None:
    made = build_mesh(device="cuda", axes=partial(Axes.of, pp=2))
    for late in (lambda: made.holders([0, 1]), lambda: build_mesh(device="cuda").neighbours(2)):
        torch_distributed.calls.clear()
        axis = late()
        assert axis is not None and axis.group in torch_distributed.of("used")
        assert torch_distributed.calls[-1] == ("synchronized", GPU)


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
    monkeypatch.setattr(mesh, "leave_in_order", lambda: None)
    build_mesh(device="cpu", timeout=timedelta(minutes=3))
    assert torch_distributed.of("init") == [{"backend": "gloo", "timeout": timedelta(minutes=3)}]
    assert all(set(vars(g)) == {"ranks", "group_name", "timeout", "backend"} for g in torch_distributed.of("group"))
    assert not torch_distributed.of("used")


def test_communicators_end_when_the_gpu_is_done_with_them(torch_distributed: Distributed) -> None:
    build_mesh(device="cuda")
    torch_distributed.calls.clear()
    mesh.leave_job()
    assert torch_distributed.calls == [("barrier", [RANK]), ("synchronized", GPU), ("destroyed", None)]
    mesh.leave_job()
    assert len(torch_distributed.calls) == 3


def test_end_training_ends_no_communicator_that_is_in_use(
    torch_distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_mesh(device="cuda")
    torch_distributed.calls.clear()
    monkeypatch.setattr(
        accelerate.Accelerator, "end_training", lambda self: torch_distributed.calls.append(("theirs", 0))
    )
    DistAccelerator.end_training(DistAccelerator.__new__(DistAccelerator))
    assert [name for name, _ in torch_distributed.calls] == ["barrier", "synchronized", "theirs"]


def maker_of(monkeypatch: pytest.MonkeyPatch, model: Distributed) -> GroupMaker:
    model.ready, model.backend = True, "nccl"
    monkeypatch.setattr(groups, "dist", model)
    return GroupMaker(model.rank, "nccl", timedelta(minutes=3), GroupLease("nccl", 7), GPU)


def groups_of_rank(rank: int, monkeypatch: pytest.MonkeyPatch, **axes: int) -> tuple[list[Any], Distributed]:
    """What one rank of 4096 makes: for the mesh, for weights of the first and the last stage, for the pipeline's channels."""
    world = 4096
    model = Distributed(world, rank)
    maker, cut = maker_of(monkeypatch, model), Axes.of(world, **axes)
    maker.views(cut)
    lines = cut.lines("pp")
    maker.axis("holders", [[line[0], line[-1]] for line in lines])
    make_channels(lines, ring=False, rank=rank, group_of=maker.one_of)
    return model.of("group"), model


def test_one_rank_of_4096_makes_the_groups_that_it_is_in_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = groups_of_rank(1030, monkeypatch, pp=8, shard=8)
    assert len(made) < 20, "eight stages in rows of eight: 512 rows have 7168 channels"
    assert all(1030 in group.ranks for group in made)
    assert not model.of("by all")


def test_all_members_give_a_group_one_name_and_no_two_groups_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = (0, 512, 1024, 1025, 3584)  # stages 0, 1, 2, 2 and 7 of two pipelines
    members: dict[str, tuple[Any, set[int]]] = {}
    for rank in ranks:
        for group in groups_of_rank(rank, monkeypatch, pp=8, shard=8)[0]:
            known, makers = members.setdefault(group.group_name, (group.ranks, set()))
            assert known == group.ranks and rank not in makers
            makers.add(rank)
    assert all(makers == set(ranks) & set(known) for known, makers in members.values())


def test_every_rank_takes_part_where_nccl_splits_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Distributed()
    model.default.bound_device_id = GPU
    maker = maker_of(monkeypatch, model)
    rows = [[0, 2], [1, 3]]
    axis = maker.axis("dp", rows)
    assert model.of("by all") == rows
    assert axis.group is not None and axis.group.ranks == [1, 3] and axis.rank == 0
    assert maker.lease.groups == [axis.group]


def test_a_transfer_between_stages_takes_a_small_part_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = maker_of(monkeypatch, Distributed())
    ends = list(make_channels([[0, 1, 2, 3]], ring=False, rank=RANK, group_of=maker.one_of).values())
    assert [end.group.pg_options.config.max_ctas for end in ends] == [4] * 4
    assert not any(end.group.pg_options.is_high_priority_stream for end in ends)
