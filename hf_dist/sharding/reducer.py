"""Gradients on their way: when a unit is reduced, in which order, and how much is in flight."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Container

from hf_dist.collectives import Handle
from hf_dist.mesh import ParallelMesh
from hf_dist.offload.host import HostLink
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.order import IssueOrder
from hf_dist.sharding.placement import Placement, StatePlacements
from hf_dist.sharding.unit import ShardUnit

MAX_REDUCTIONS_IN_FLIGHT = 2


class Reducer:
    """Reduces complete units in an order that is the same on every rank, never by readiness."""

    def __init__(
        self,
        units: list[ShardUnit],
        placements: StatePlacements,
        mesh: ParallelMesh,
        link: HostLink,
        max_numel: int,
    ) -> None:
        """`link`: to where offloaded gradients go; `max_numel`: elements in flight (at least one unit), 0 to wait for each
        reduction at once."""
        self.units = units
        self.placements = placements
        self.mesh = mesh
        self.link = link
        self.max_numel = max_numel
        self.finishing: Container[int] = range(len(units))
        """Units whose gradients of the window are complete after the backward under way."""
        self.order = IssueOrder([u.index for u in reversed(units) if u.trainable])
        self.when_final: Callable[[FlatGroup], None] | None = None
        """Called when the gradient of a group is complete for the window, with nothing left to add over the ranks."""
        self._in_flight: deque[tuple[int, Handle]] = deque()  # (elements, handle)
        self._replicating: list[Handle] = []
        self._held_elsewhere: list[FlatGroup] = []

    def reduces(self, index: int) -> bool:
        """Whether unit `index` is reduced after the backward under way."""
        return self.placements.grads is Placement.SHARD or index in self.finishing

    def unit_complete(self, unit: ShardUnit) -> None:
        """All gradients of `unit` are there: reduce what is next in the order, as far as it is complete."""
        if not self.reduces(unit.index):
            return
        if unit.index not in self.order.seen:
            self.order.seen.append(unit.index)
        while (index := self.order.peek()) is not None and (self.units[index].complete or not self.reduces(index)):
            self.order.advance()
            if self.reduces(index):
                self._reduce(self.units[index])

    def finish_backward(self) -> None:
        """The units that did not complete on this rank take part all the same, with zeros for what is missing."""
        for index in self.order.rest():
            if self.reduces(index):
                self._reduce(self.units[index])
        # Reentrant checkpointing runs a backward of its own per call of a unit: what came after the first reduction.
        for unit in self.units:
            if self.reduces(unit.index) and any(g.window.values is not None for g in unit.trainable):
                self._reduce(unit)

    def _reduce(self, unit: ShardUnit) -> None:
        numel = sum(g.layout.numel for g in unit.trainable)
        while self._in_flight and (
            len(self._in_flight) >= MAX_REDUCTIONS_IN_FLIGHT
            or sum(n for n, _ in self._in_flight) + numel > self.max_numel
        ):
            self._in_flight.popleft()[1].wait()
        for group in unit.trainable:
            handle = group.reduce()
            if unit.index in self.finishing:
                if self.mesh.dp_replicate.size > 1:
                    handle = Handle([handle], functools.partial(self._replicate, group))
                elif group.holders is None and self.when_final is not None:
                    handle = Handle([handle], functools.partial(self.when_final, group))
                if group.holders is not None:
                    self._held_elsewhere.append(group)
            self._in_flight.append((group.layout.numel, handle))
        if not self.max_numel:
            self.settle()

    def _replicate(self, group: FlatGroup) -> None:
        """HSDP: the mean over the replicas, once per window."""
        self._replicating.append(group.replicate())

    def settle(self) -> None:
        """Wait for the reductions in flight. Local."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()

    def wait(self) -> None:
        """Until nothing is in flight, nor on its way to the host.

        Weights that several pipeline stages hold get the sum of their gradients.
        Collective over the holders of such weights, once per window; local otherwise.
        """
        self.settle()
        for handle in self._replicating:
            handle.wait()
        self._replicating.clear()
        for group in self._held_elsewhere:
            group.add_up_holders()
        self._held_elsewhere.clear()
        self.link.wait_host()

    def drop(self) -> None:
        """Forget the gradients of the window."""
        self.wait()
        for unit in self.units:
            for group in unit.trainable:
                group.drop_gradients()
