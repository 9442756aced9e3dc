"""Point-to-point transfers between neighbouring pipeline ranks over torch.distributed (gloo or NCCL), with changing shapes.

Every channel (directed edge, activations or gradients) has its own process group and is used in the same order on both ends,
so transfers in opposite directions cannot block each other. Shapes precede the first transfer of a key, and both ends remember
them. Later transfers carry only data and are posted ahead. Data is sent as bytes (`freight.py`).

[Note: channels over NCCL] The first operation of a communicator blocks the host until the peer starts its own. Ranks that
first use their communicators in different orders would deadlock, so `connect` uses every channel once, in one order, before
any schedule runs. A single tensor and a batch of tensors would use two communicators, so a single tensor is sent as a batch.
A waiting receive occupies a part of the GPU: see `waits_on_device`.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.dist import collectives, comm_counter
from hf_dist.dist.rendezvous import CONNECTIONS
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.parallel.pipeline.communication import Channel
from hf_dist.parallel.pipeline.freight import Freight
from hf_dist.parallel.pipeline.probe import TensorSpec
from hf_dist.parallel.pipeline.runtime import shapes_in_words
from hf_dist.tensors.checksum import as_bytes

__all__ = ["ChannelEnds", "P2PTransport", "make_channels"]

_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


@dataclass(frozen=True, eq=False)
class ChannelEnds:
    """The process group of a channel and the global ranks of its ends."""

    group: dist.ProcessGroup
    source: int
    target: int


def make_channels(
    rows: Sequence[Sequence[int]], *, ring: bool, rank: int, group_of: Callable[..., dist.ProcessGroup | None]
) -> dict[Channel, ChannelEnds]:
    """Make the channels that this process is an end of. Collective over the whole job, with the same `rows`.

    `rows`: the global ranks of every pipeline of the job, first stage first; `ring`: add channels from the last rank to the
    first (for several stages per rank); `rank`: of this process; `group_of`: `GroupMaker.one_of`.
    """
    mine: dict[Channel, ChannelEnds] = {}
    size = len(rows[0])
    own = next(row for row in rows if rank in row)
    pairs = [(i, (i + 1) % size) for i in range(size if ring and size > 1 else size - 1)]
    for source, target, kind in [(a, b, "F") for a, b in pairs] + [(b, a, "B") for a, b in pairs]:
        ends = [sorted((row[source], row[target])) for row in rows]
        group = group_of(ends, f"{kind} {source}-{target}", kind="channel")
        if group is not None:
            mine[Channel(source, target, kind)] = ChannelEnds(group, own[source], own[target])
    return mine


@dataclass
class _Arriving:
    """A receive in flight."""

    specs: list[TensorSpec]
    buffers: list[torch.Tensor]
    works: list[Any]


class P2PTransport:
    """`runtime.Transport` between processes."""

    def __init__(
        self, channels: dict[Channel, ChannelEnds], device: torch.device, freight: Freight | None = None
    ) -> None:
        """`device`: target of received tensors. Over gloo, GPU tensors pass through the host. `freight`: default: whole."""
        self.channels = channels
        self.device = device
        self.freight = freight or Freight()
        self.sent_nbytes = 0
        """Bytes that this rank has sent."""
        self.waits_on_device = any(self._is_nccl(ends) for ends in channels.values())
        """See `runtime.Transport`."""
        self._known: dict[tuple[Channel, object], list[TensorSpec]] = {}
        self._arriving: dict[Channel, deque[_Arriving]] = defaultdict(deque)
        self._leaving: deque[tuple[list[Any], list[torch.Tensor]]] = deque()

    def connect(self) -> None:
        """Use every channel once; see [Note: channels over NCCL]. Collective over all ends, right after `make_channels`."""
        for ends in self.channels.values():  # in the order of creation, equal on every process
            if self._is_nccl(ends):
                token = torch.zeros(1, dtype=torch.uint8, device=self.device)
                for work in self._start(ends, [token], receive=dist.get_rank() == ends.target):
                    work.wait()
        if self.waits_on_device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.waits_on_device and os.environ.get(CONNECTIONS) == "1":
            warn_once(
                f"{CONNECTIONS}=1: all streams of a process share one GPU queue, so a receive that waits for another stage "
                "blocks all later work. Unset it, or set it to 32, before the job starts."
            )

    def send(self, channel: Channel, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; see `runtime.Transport`. Raises `ModelError` if the shapes differ from earlier ones of `key`."""
        ends = self.channels[channel]
        specs = [TensorSpec.of(t) for t in tensors]
        if key is not None:
            known = self._known.setdefault((channel, key), specs)
            if known is specs:
                self._send_specs(ends, specs)
            elif known != specs:
                raise ModelError(
                    f"what stage {key[0]} sends changed from [{', '.join(map(str, known))}] to "
                    f"[{', '.join(map(str, specs))}] for microbatches of the same shapes, [{shapes_in_words(key[2])}]. The "
                    "shapes between stages must depend on those of the batch alone, and parameters must not be frozen or "
                    "unfrozen during training."
                )
        self._leave(ends, self.freight.packed(tensors, specs))

    def can_post(self, channel: Channel, key: object) -> bool:
        """See `runtime.Transport`."""
        return (channel, key) in self._known

    def post(self, channel: Channel, key: object, specs: Sequence[TensorSpec] | None) -> None:
        """See `runtime.Transport`."""
        ends = self.channels[channel]
        wanted = self._known[channel, key] if specs is None else list(specs)
        buffers = [self._buffer(ends, nbytes) for nbytes in self.freight.nbytes(wanted)]
        self._arriving[channel].append(_Arriving(wanted, buffers, self._start(ends, buffers, receive=True)))

    def receive(self, channel: Channel, key: object, specs: Sequence[TensorSpec] | None) -> list[torch.Tensor]:
        """See `runtime.Transport`."""
        if not self._arriving[channel]:
            if specs is None and (channel, key) not in self._known:
                self._known[channel, key] = self._receive_specs(self.channels[channel])
            self.post(channel, key, specs)
        arriving = self._arriving[channel].popleft()
        for work in arriving.works:
            collectives.block_on(work)
        arrived = self.freight.unpacked([buffer.to(self.device) for buffer in arriving.buffers], arriving.specs)
        # key None: gradients, which autograd takes without history
        return [
            tensor.requires_grad_(spec.requires_grad and key is not None)
            for tensor, spec in zip(arrived, arriving.specs, strict=True)
        ]

    def finish(self) -> None:
        """See `runtime.Transport`."""
        while self._leaving:
            for work in self._leaving.popleft()[0]:
                collectives.block_on(work)

    def _leave(self, ends: ChannelEnds, flat: list[torch.Tensor]) -> None:
        while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
            self._leaving.popleft()
        if self._through_host(ends):
            flat = [t.cpu() for t in flat]
        self.sent_nbytes += sum(t.numel() for t in flat)
        self._leaving.append((self._start(ends, flat, receive=False), flat))

    def _start(self, ends: ChannelEnds, flat: list[torch.Tensor], receive: bool) -> list[Any]:
        comm_counter.count_start()
        flat = [t for t in flat if t.numel()]
        if flat and self._is_nccl(ends):
            operation, peer = (dist.irecv, ends.source) if receive else (dist.isend, ends.target)
            return dist.batch_isend_irecv([dist.P2POp(operation, t, peer, ends.group) for t in flat])
        if receive:
            return [dist.irecv(t, src=ends.source, group=ends.group) for t in flat]
        return [dist.isend(t, dst=ends.target, group=ends.group) for t in flat]

    def _buffer(self, ends: ChannelEnds, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu" if self._through_host(ends) else self.device)

    @staticmethod
    def _is_nccl(ends: ChannelEnds) -> bool:
        return dist.get_backend(ends.group) == "nccl"

    def _through_host(self, ends: ChannelEnds) -> bool:
        return self.device.type != "cpu" and dist.get_backend(ends.group) == "gloo"

    def _send_specs(self, ends: ChannelEnds, specs: list[TensorSpec]) -> None:
        numbers = [n for s in specs for n in (_DTYPES.index(s.dtype), s.requires_grad, len(s.shape), *s.shape)]
        head = torch.tensor([len(numbers)], device=self.device)
        self._leave(ends, [as_bytes(head)])
        if numbers:
            self._leave(ends, [as_bytes(torch.tensor(numbers, device=self.device))])

    def _receive_specs(self, ends: ChannelEnds) -> list[TensorSpec]:
        def numbers(count: int) -> list[int]:
            buffer = self._buffer(ends, 8 * count)
            for work in self._start(ends, [buffer], receive=True):
                collectives.block_on(work)
            return buffer.view(torch.int64).tolist()

        rest = numbers(numbers(1)[0])
        specs = []
        while rest:
            dtype, grad, ndim = rest[:3]
            specs.append(TensorSpec(tuple(rest[3 : 3 + ndim]), _DTYPES[dtype], bool(grad)))
            del rest[: 3 + ndim]
        return specs
