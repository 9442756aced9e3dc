"""NCCL as one rank sees it, written into its trace: `wait()` holds a stream and not the host.

Every communicator has a stream of its own. What is issued goes on when the current stream has come as far as it is; `wait()`
makes the current stream wait for it. What an asynchronous operation reads and writes lives until somebody waits, as torch keeps
it. Whether the other ranks come, and when, is `replay.py`'s question; here they only answer what is asked of objects.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from hf_dist.dist import collective_guard, collectives
from hf_dist.memory.offload import host
from hf_dist.parallel.pipeline import p2p
from tests.gpu_sim import costs
from tests.gpu_sim.recorder import Recorder, where
from tests.gpu_sim.trace import Point, Transfer

Represented = Callable[[int], int]
"""Rank -> the simulated rank that does what this one would do."""


class Communicators:
    """Groups of this rank, and what it does with them."""

    def __init__(self, recorder: Recorder, rank: int, store: Any, represented: Represented) -> None:
        self.recorder, self.rank, self.store, self.represented = recorder, rank, store, represented
        self.network: float | Callable[[str, tuple[int, ...]], float] | None = None
        """Bytes per second, where it is not that of `costs`; of a kind of operation among some ranks."""
        self._groups: dict[str, tuple[str, tuple[int, ...], str]] = {}  # torch's name -> name, ranks, backend
        self._made: Counter[tuple[int, ...]] = Counter()
        self._asked: Counter[str] = Counter()
        self._kept: list[Work] = []  # what nobody has waited for lives on, as NCCL's watchdog has it
        self._make = dist.new_group

    # -------------------------------------------------------------------- groups

    def new_group(self, ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        """In place of `dist.new_group`."""
        chosen = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        local = {key: more[key] for key in ("use_local_synchronization",) if key in more}
        with _disable_current_modes():
            group = self._make(list(chosen), backend="fake", **local)
        self._made[chosen] += 1
        if self.rank in chosen:
            self.know(group, chosen, f"ranks {','.join(map(str, chosen))} #{self._made[chosen]}", backend or "nccl")
        return group

    def know(self, group: Any, ranks: tuple[int, ...], name: str, backend: str) -> None:
        """A group that was made."""
        self._groups[group.group_name] = name, ranks, backend

    def get_backend(self, group: Any = None) -> str:
        """In place of `dist.get_backend`."""
        return self._groups[(group or dist.group.WORLD).group_name][2]

    def _of(self, group: Any) -> tuple[str, tuple[int, ...]]:
        return self._groups[(group or dist.group.WORLD).group_name][:2]

    # --------------------------------------------------------------- on the device

    def issue(
        self, kind: str, group: Any, reads: list[torch.Tensor], writes: list[torch.Tensor], *, lone: bool = False
    ) -> Work:
        """One operation on the communicator of `group`; a `lone` transfer has one of its own."""
        name, ranks = self._of(group)
        name += ", lone transfers" if lone else ""
        tensors = [*reads, *writes]
        nbytes = (
            sum(map(costs.nbytes_of, tensors)) if kind in ("send", "receive") else max(map(costs.nbytes_of, tensors))
        )
        trace, stream = self.recorder.trace, f"nccl {name}"
        network = self.network(kind, ranks) if callable(self.network) else self.network
        trace.order(stream, trace.point(self.recorder.stream_name()))
        point = trace.launch(
            stream, kind, where(),
            reads=tuple(map(self.recorder.block_of, reads)), writes=tuple(map(self.recorder.block_of, writes)),
            seconds=costs.transfer_seconds(kind, nbytes, len(ranks), network),
            transfer=Transfer(name, ranks, kind, nbytes),
        )  # fmt: skip
        work = Work(self.recorder, point, tensors)
        self._kept.append(work)
        return work

    def _started(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    def all_gather(self, output: Any, input: Any, group: Any = None, async_op: bool = False) -> Any:
        return self._started(self.issue("all_gather", group, [input], [output]), async_op)

    def reduce_scatter(self, output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        return self._started(self.issue("reduce_scatter", group, [input], [output]), async_op)

    def all_to_all(
        self, output: Any, input: Any, received: Any = None, sent: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._started(self.issue("all_to_all", group, [input], [output]), async_op)

    def all_reduce(self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        if not tensor.is_cuda:
            return SimpleNamespace(wait=lambda *_: None, is_completed=lambda: True) if async_op else None
        return self._started(self.issue("all_reduce", group, [], [tensor]), async_op)

    def broadcast(
        self, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        if not tensor.is_cuda:
            return None
        return self._started(self.issue("broadcast", group, [], [tensor]), async_op)

    def isend(self, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        return self.issue("send", group, [tensor], [], lone=True)

    def irecv(self, tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        return self.issue("receive", group, [], [tensor], lone=True)

    def batch(self, operations: list[Any]) -> list[Any]:
        """In place of `dist.batch_isend_irecv`: one kernel for all of them."""
        sends = [op.tensor for op in operations if op.op == self.isend]
        receives = [op.tensor for op in operations if op.op != self.isend]
        assert not (sends and receives), "not modelled"
        return [self.issue("send" if sends else "receive", operations[0].group, sends, receives)]

    # ----------------------------------------------------------------- of the host

    def all_gather_object(self, into: list[Any], item: Any, group: Any = None) -> None:
        """Every rank's object; those of ranks that are not simulated are their representatives'."""
        name, ranks = self._of(group)
        into[:] = self._exchange(name, ranks, item)

    def broadcast_object_list(self, items: list[Any], src: Any = None, group: Any = None, **more: Any) -> None:
        """That of the source."""
        name, ranks = self._of(group)
        source = ranks[more["group_src"]] if more.get("group_src") is not None else (src or 0)
        items[:] = self._exchange(name, ranks, list(items))[ranks.index(source)]

    def barrier(self, group: Any = None, device_ids: Any = None, async_op: bool = False) -> None:
        """Blocks the host, on NCCL too."""
        name, ranks = self._of(group)
        self._exchange(name, ranks, None)

    def lines(self, axis: Any, called: str) -> list[str]:
        """In place of `on_one_rank._gathered`: which call every rank makes, and where."""
        name, ranks = self._of(axis.group)
        return self._exchange(name, ranks, called)

    def _exchange(self, name: str, ranks: tuple[int, ...], item: Any) -> list[Any]:
        self._asked[name] += 1
        with _disable_current_modes():
            answers = {self.rank: item}
            others = {self.represented(rank) for rank in ranks} - {self.rank}
            if others:
                key = f"{name}/{self._asked[name]}"
                self.store.set(f"{key}/{self.rank}", _dumped(item))
                answers |= {rank: pickle.loads(self.store.get(f"{key}/{rank}")) for rank in others}
            return [answers[self.represented(rank)] for rank in ranks]

    # --------------------------------------------------------- shapes of a pipeline

    def send_specs(self, transport: Any, ends: Any, specs: Any) -> None:
        """The numbers travel as they would; what they say goes another way, since no tensor here has elements."""
        numbers = torch.zeros(16, dtype=torch.int64, device=transport.device)
        transport._leave(ends, [p2p.as_bytes(numbers)])
        name, _ = self._of(ends.group)
        self._asked[name] += 1
        with _disable_current_modes():
            self.store.set(f"{name}/{self._asked[name]}/specs", _dumped(specs))

    def receive_specs(self, transport: Any, ends: Any) -> Any:
        """See `send_specs`; the host waits for them."""
        for work in transport._start(ends, [transport._buffer(ends, 128)], receive=True):
            work.wait()
        trace = self.recorder.trace
        self.recorder.host_waits((trace.point(self.recorder.stream_name()),), "shapes of the first transfer")
        name, _ = self._of(ends.group)
        self._asked[name] += 1
        with _disable_current_modes():
            return pickle.loads(self.store.get(f"{name}/{self._asked[name]}/specs"))


class Work:
    """What an asynchronous operation returns."""

    def __init__(self, recorder: Recorder, point: Point, tensors: list[torch.Tensor]) -> None:
        self._recorder, self._point = recorder, point
        self._tensors: list[torch.Tensor] | None = tensors

    def wait(self, *timeout: Any) -> bool:
        """The current stream waits, the host does not."""
        self._recorder.trace.order(self._recorder.stream_name(), self._point)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return self._recorder.is_known((self._point,))


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        """Of a tensor without elements its shape goes over."""
        if isinstance(item, FakeTensor):
            return _zeros, (tuple(item.shape), item.dtype)
        return NotImplemented


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _dumped(item: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


class _P2POp:
    def __init__(self, op: Any, tensor: Any, peer: Any = None, group: Any = None) -> None:
        self.op, self.tensor, self.group = op, tensor, group


@contextmanager
def as_nccl(
    recorder: Recorder, world: int, rank: int, store: Any = None, represented: Represented = lambda rank: 0
) -> Iterator[Communicators]:
    """Inside, `torch.distributed` is `rank` of `world` over NCCL, as far as anybody here can tell."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    model = Communicators(recorder, rank, store, represented)
    model.know(dist.group.WORLD, tuple(range(world)), "default", "nccl")
    options = SimpleNamespace(Options=lambda **given: SimpleNamespace(config=SimpleNamespace(), **given))
    try:
        with ExitStack() as stack:
            names = ("new_group", "get_backend", "all_reduce", "broadcast", "isend", "irecv", "barrier")
            stand_ins = {name: getattr(model, name) for name in (*names, "all_gather_object", "broadcast_object_list")}
            stand_ins |= {"batch_isend_irecv": model.batch, "P2POp": _P2POp}
            stand_ins |= dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), model.all_gather)
            stand_ins |= dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), model.reduce_scatter)
            stand_ins["all_to_all_single"] = model.all_to_all
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(dist, name, stand_in, create=True))
            stack.enter_context(mock.patch.object(dist.distributed_c10d, "ProcessGroupNCCL", options, create=True))
            stack.enter_context(mock.patch.object(collective_guard, "_gathered", model.lines))
            stack.enter_context(mock.patch.object(collectives, "_all_gather", model.all_gather))
            stack.enter_context(mock.patch.object(collectives, "_reduce_scatter", model.reduce_scatter))
            transport = p2p.P2PTransport
            stack.enter_context(mock.patch.object(transport, "_send_specs", lambda *given: model.send_specs(*given)))
            stack.enter_context(
                mock.patch.object(transport, "_receive_specs", lambda *given: model.receive_specs(*given))
            )
            stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 29, 3)))
            yield model
    finally:
        dist.destroy_process_group()


@contextmanager
def on_host(recorder: Recorder) -> Iterator[None]:
    """Inside, buffers of the host have no elements, and are page-locked when that is asked for."""
    pages = mock.patch.object(host, "fresh_pages", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with pages, mock.patch.object(host, "_register", recorder.lock):
        yield
