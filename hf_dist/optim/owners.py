"""Owners of tensors that a step must see whole, and the exchanges that bring tensors to their owners and results back.

[Note: owners] Masters and gradients are sharded into intervals, but some optimizers need whole tensors. For the step, each such
tensor is gathered on one rank of those that hold its parts, the owner, which computes the result and sends it back. Every rank
derives the same owners from the layouts alone: heaviest tensor first, to the least loaded rank. The caller decides what is
sent: gradients and masters in fp32 for any optimizer object (`whole_step.py`), one bf16 matrix for Muon (`muon_step.py`).
Per element and step, a rank sends (bytes to owner + bytes back) (N - 1) / N^2. If optimizer states rest replicated, nothing is
sent to the owner and the result goes to all ranks: (bytes back) (N - 1) / N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.placement import Placement

__all__ = ["Owned", "Owners", "assigned", "heaviest_first", "step_whole"]

BUCKET_NUMEL = 1 << 26
"""Elements, over all ranks, that are whole at a time, while the next round's are in flight."""


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter, or one matrix of a batch, that one rank sees whole."""

    group: FlatGroup
    index: int
    """Position of the parameter in `group`."""
    start: int
    """Index of its first element in the flattened parameter."""
    shape: tuple[int, ...]
    owner: int
    """The owner's rank on `axis`."""

    @property
    def slot(self) -> ParamSlot:
        """The parameter's slot."""
        return self.group.layout.slots[self.index]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def axis(self) -> MeshAxis:
        """The axis whose ranks hold intervals of it."""
        return self.group.axes.holders

    @property
    def is_mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.axis.rank

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it before the step and needs all of it afterwards."""
        return self.group.placements.optim is not Placement.SHARD

    def part(self, rank: int) -> tuple[int, int]:
        """Interval [start, stop) of it that `rank` holds before the step and receives after it."""
        if self.is_replicated:
            return 0, self.numel
        place = self.group.axes.place_of(rank)
        start, stop = (edge - self.start for edge in self.group.layout.fragment(self.slot, place))
        first = min(max(start, 0), self.numel)
        return first, max(first, min(stop, self.numel))

    def length(self, rank: int) -> int:
        """Number of elements of `part(rank)`."""
        start, stop = self.part(rank)
        return stop - start

    def of(self, values: torch.Tensor, begins: int = 0) -> torch.Tensor:
        """1-D view of this rank's part in `values`, a tensor laid out like the group's masters from element `begins` on."""
        start, stop = self.part(self.axis.rank)
        first = self.slot.offset + self.start + start - self.group.resting[0] - begins
        return values[first : first + stop - start] if stop > start else values[:0]


class Owners:
    """All owned tensors of one optimizer, balanced by cost."""

    def __init__(self, cost: Callable[[tuple[int, ...]], float] = math.prod) -> None:
        """`cost`: cost of a tensor as a function of its shape."""
        self.items: list[Owned] = []
        self._cost = cost
        self._loads: dict[int, list[float]] = {}  # id of the axis -> load of each rank

    def add(self, tensors: Iterable[tuple[FlatGroup, int, int, tuple[int, ...]]]) -> list[Owned]:
        """Assign owners to `tensors`: (group, index, start, shape). Local; all ranks of the axes must pass the same ones."""
        added = []
        parts = [(self._cost(t[3]), t[0].layout.slots[t[1]].name, *t) for t in tensors]
        for cost, _, group, index, start, shape in sorted(parts, key=heaviest_first):
            axis = group.axes.holders
            load = self._loads.setdefault(id(axis), [0.0] * axis.size)
            added.append(Owned(group, index, start, shape, assigned([cost], load)[0]))
        self.items += added
        return added

    def buckets(self, wanted: Callable[[Owned], bool]) -> list[list[Owned]]:
        """Divide the `wanted` items into rounds that give every owner work. Local; every rank makes the same rounds."""
        rounds: list[list[Owned]] = []
        for axis in {id(o.axis): o.axis for o in self.items}.values():
            mine = [o for o in self.items if o.axis is axis and o.numel and wanted(o)]
            queues = [[o for o in mine if o.owner == rank] for rank in range(axis.size)]
            share = BUCKET_NUMEL // axis.size
            while any(queues):
                rounds.append([item for queue in queues for item in _taken(queue, share)])
        return rounds


def heaviest_first(part: Any) -> tuple[object, ...]:
    """Sort key for (cost, name, ...); tensors of equal cost and name, a batch, keep their order."""
    return -part[0], part[1]


def assigned(costs: Sequence[float], load: list[float]) -> list[int]:
    """The owner rank for each cost: the rank with the smallest `load`, which is updated."""
    owners = []
    for cost in costs:
        owners.append(load.index(min(load)))
        load[owners[-1]] += cost
    return owners


def _taken(queue: list[Owned], numel: int) -> list[Owned]:
    """Take items off the front of `queue` while they fit into `numel` elements; at least one."""
    taken: list[Owned] = []
    while queue and (not taken or sum(o.numel for o in taken) + queue[0].numel <= numel):
        taken.append(queue.pop(0))
    return taken


Wholes = list[tuple[Owned, list[torch.Tensor]]]
"""This rank's owned items of a round, each with its gathered tensors in the item's shape."""


def step_whole(
    rounds: Sequence[Sequence[Owned]],
    leave: Callable[[Owned], list[torch.Tensor]],
    work: Callable[[Wholes], Mapping[Owned, torch.Tensor]],
    arrive: Callable[[Owned, torch.Tensor], None],
    dtype: torch.dtype,
) -> None:
    """Send every round's tensors to their owners, call `work` there, and send results back. Collective over the items' axes.

    `leave`: returns this rank's 1-D parts of an item's tensors (equal number and dtype for all items); `work`: returns a whole
    result in `dtype` for each item this rank owns; `arrive`: receives this rank's part of a result. One round is computed while
    the next is in flight.
    """
    coming = _to_owners(rounds[0], leave) if rounds else None
    back: Callable[[], None] | None = None
    for k, items in enumerate(rounds):
        assert coming is not None
        ahead = _to_owners(rounds[k + 1], leave) if k + 1 < len(rounds) else None
        results = work(coming())
        returning = _to_shards(items, results, arrive, dtype)
        if back is not None:
            back()
        back, coming = returning, ahead
    if back is not None:
        back()


def _to_owners(items: Sequence[Owned], leave: Callable[[Owned], list[torch.Tensor]]) -> Callable[[], Wholes]:
    """Start sending a round to its owners; the returned function waits and returns this rank's whole tensors."""
    axis, device = items[0].axis, items[0].group.mesh.device
    mine = [o for o in items if o.is_mine]
    parts = {o: leave(o) for o in items}
    count = len(parts[items[0]])
    if items[0].is_replicated or axis.size == 1:
        return lambda: [(o, [v.to(device).view(o.shape) for v in parts[o]]) for o in mine]
    to = [[v for o in items if o.owner == rank for v in parts[o]] for rank in range(axis.size)]
    wire = torch.cat([v.to(device, non_blocking=True) for values in to for v in values])
    received = [count * sum(o.length(rank) for o in mine) for rank in range(axis.size)]
    out = wire.new_empty(sum(received))
    handle = collectives.all_to_all(axis, wire, out, [sum(v.numel() for v in values) for values in to], received)

    def wait() -> Wholes:
        handle.wait()
        whole: Wholes = [(o, [out.new_empty(o.numel) for _ in range(count)]) for o in mine]
        at = 0
        for rank in range(axis.size):
            for o, tensors in whole:
                start, stop = o.part(rank)
                for tensor in tensors if stop > start else ():
                    tensor[start:stop] = out[at : at + stop - start]
                    at += stop - start
        return [(o, [t.view(o.shape) for t in tensors]) for o, tensors in whole]

    return wait


def _to_shards(
    items: Sequence[Owned],
    results: Mapping[Owned, torch.Tensor],
    arrive: Callable[[Owned, torch.Tensor], None],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Start sending results back; the returned function waits and passes this rank's parts to `arrive`."""
    axis, device = items[0].axis, items[0].group.mesh.device
    if axis.size == 1:

        def hand_on() -> None:
            for o in items:
                arrive(o, results[o].reshape(-1))

        return hand_on
    mine = [o for o in items if o.is_mine]
    flat = {o: results[o].reshape(-1) for o in mine}
    pieces = [flat[o][slice(*o.part(rank))] for rank in range(axis.size) for o in mine]
    wire = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    sent = [sum(o.length(rank) for o in mine) for rank in range(axis.size)]
    from_rank = [[o for o in items if o.owner == rank] for rank in range(axis.size)]
    received = [sum(o.length(axis.rank) for o in theirs) for theirs in from_rank]
    out = torch.empty(sum(received), dtype=dtype, device=device)
    handle = collectives.all_to_all(axis, wire, out, sent, received)

    def wait() -> None:
        handle.wait()
        parts = out.split([o.length(axis.rank) for theirs in from_rank for o in theirs])
        for o, part in zip((o for theirs in from_rank for o in theirs), parts, strict=True):
            arrive(o, part)

    return wait
