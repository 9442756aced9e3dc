"""One rank of a job whose other ranks do not exist, on tensors without elements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_dist.dist import collectives, mesh
from hf_dist.dist.axes import RANKS_PER_MACHINE
from tests.scale.live import Live

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional

_ANSWERED: dict[Any, tuple[str, Callable[[Any], torch.Tensor]]] = {
    c10d._allgather_base_.default: ("all_gather", lambda args: args[0]),
    c10d._reduce_scatter_base_.default: ("reduce_scatter", lambda args: args[1]),
    c10d.allreduce_.default: ("all_reduce", lambda args: args[0][0]),
}
"""Collectives that a step makes: their name, and the tensor that has every rank's part."""
_COUNTED: dict[Any, tuple[str, Callable[[Any], torch.Tensor]]] = {
    functional.all_reduce.default: ("all_reduce", lambda args: args[0]),
}
"""Those of DTensor, which have an implementation for fake tensors."""
_SET_UP = ("all_gather_object", "broadcast_object_list", "barrier")


def forget_launcher() -> None:
    """In a child of `tests.harness`, which was told that it is one of so many."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is `rank` of `size`: torch's fake process group, in which every rank sends what this one does.

    Objects are gathered for real, `size` times this rank's own, also where a `FakeRank` is active, but for host names: a
    machine has `RANKS_PER_MACHINE` ranks. Ours are held by a
    collective until it is waited for, as NCCL's and gloo's hold them (FSDP2 keeps its own).
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    originals = {name: getattr(dist, name) for name in _SET_UP}

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(dist, name, outside(function))
    reduce_scatter = collectives._reduce_scatter
    collectives._reduce_scatter = lambda *args, **kwargs: _Holding(reduce_scatter(*args, **kwargs), args)
    hosts = tuple(f"machine{number // RANKS_PER_MACHINE}" for number in range(size))
    try:
        with mock.patch.object(mesh, "_meet", lambda facts, world: hosts):
            yield
    finally:
        collectives._reduce_scatter = reduce_scatter
        for name, function in originals.items():
            setattr(dist, name, function)
        dist.destroy_process_group()


class _Holding:
    def __init__(self, work: Any, tensors: Any) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self) -> None:
        self._work.wait()
        self._tensors = None


@dataclass
class Traffic:
    """Collectives of one rank: (number, bytes that it sends) by kind."""

    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        """One more."""
        count, total = self.by_kind.get(kind, (0, 0))
        self.by_kind[kind] = count + 1, total + nbytes


class FakeRank(FakeTensorMode):
    """Tensors made inside have shapes and storages but no elements. Collectives are counted and done at once.

    What the host reads of a tensor is made up: true, one half, or one. `live` knows the bytes of all tensors.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live = Live()
        self.traffic = Traffic()
        self.operators = 0
        """Called so far."""
        self.operator_seconds = 0.0
        """CPU time inside of them: of the simulation, not of who calls them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        start = time.thread_time()
        self.operators += 1
        try:
            return self._run(func, types, args, kwargs)
        finally:
            self.operator_seconds += time.thread_time() - start

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else (0.5 if dtype.is_floating_point else 1)
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func in _ANSWERED:
            kind, whole = _ANSWERED[func]
            self._count(kind, whole(args), CollectiveOp.get_process_group(func, args).size())
            return args[0], FakeWork().boxed()
        if func in _COUNTED:
            kind, whole = _COUNTED[func]
            self._count(kind, whole(args), CollectiveOp.get_process_group(func, args).size())
        if func is aten.silu_backward.default:  # its fake version is made of fp32 operators that no kernel has
            func, args, kwargs = aten.empty_like.default, args[:1], {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":  # twins of which stages are planned
                self.live.see(leaf)
        return out

    def _count(self, kind: str, whole: torch.Tensor, size: int) -> None:
        """The bytes that the best algorithms send, as `hf_dist.dist.comm_counter` counts them."""
        nbytes = whole.numel() * whole.element_size() * (2 if kind == "all_reduce" else 1)
        self.traffic.add(kind, nbytes * (size - 1) // size)
