"""Gradient reduction: when each unit is reduced, in which order, and how many elements may be in flight."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Container

from hf_dist.dist.collectives import Handle
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.ranges import named
from hf_dist.memory.offload.host import HostLink
from hf_dist.sharding.combining import combine, combine_together
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.group_axes import Combination
from hf_dist.sharding.moments import Listener
from hf_dist.sharding.order import IssueOrder
from hf_dist.sharding.placement import Placement, StatePlacements
from hf_dist.sharding.unit import ShardUnit

# One travels while the next is filled. More would only hold memory: a link does one at a time.
MAX_REDUCTIONS_IN_FLIGHT = 2


class Reducer:
    """Reduces complete units in an order that is the same on every rank, never in order of readiness."""

    def __init__(
        self,
        units: list[ShardUnit],
        placements: StatePlacements,
        mesh: ParallelMesh,
        link: HostLink,
        listener: Listener,
        max_numel: int,
    ) -> None:
        """`link`: connection to the host for offloaded gradients; `listener`: told of each complete gradient; `max_numel`:
        elements in flight (at least one unit), 0 to wait for each reduction at once."""
        self.units = units
        self.placements = placements
        self.mesh = mesh
        self.link = link
        self.listener = listener
        self.max_numel = max_numel
        self.finishing: Container[int] = range(len(units))
        """Units whose gradients of the window are complete after the current backward."""
        self.order = IssueOrder([u.index for u in reversed(units) if u.trainable])
        self._unfinished: set[int] = set()  # units whose latest backward was not announced as their last
        self._dropping = False
        self._in_flight: deque[tuple[FlatGroup, int, Handle]] = deque()  # (whose gradient, elements, handle)
        self._combining: deque[Handle] = deque()
        self._followed: set[int] = set()  # ids of groups whose follow-ups may be in flight, which read their gradient
        self._at_end: list[tuple[FlatGroup, Combination]] = []
        self._added_up: list[FlatGroup] = []  # combined by a sum, of which this rank is not the first

    def begin_backward(self, finishing: Container[int]) -> None:
        """`finishing`: units whose gradients of the window should be complete after the backward that now begins. Local."""
        self.finishing = finishing
        if self._added_up:  # more backward after a sum, which will run again: each part counts once
            self.drain()
            for group in self._added_up:
                if group.grad is not None:
                    group.grad.zero_()
            self._added_up.clear()
        for index in self.order.units:
            if index in finishing:
                self._unfinished.discard(index)
            else:
                self._unfinished.add(index)

    def reduces(self, index: int) -> bool:
        """Whether unit `index` is reduced in the current backward."""
        return self.placements.grads is Placement.SHARD or index in self.finishing

    def unit_complete(self, unit: ShardUnit) -> None:
        """Called when all gradients of `unit` have arrived. Reduces the next units of the order that are complete."""
        if not self.reduces(unit.index):
            return
        # What was seen becomes the common order, and a unit that completes twice (retained graphs) has one place in it.
        if unit.index not in self.order.seen:
            self.order.seen.append(unit.index)
        # Not in order of readiness: ranks finish units in different orders, and reductions must pair up on all of them.
        while (index := self.order.peek()) is not None and (self.units[index].complete or not self.reduces(index)):
            self.order.advance()
            # What this backward does not reduce (another pipeline stage's units) is passed over, not waited for.
            if self.reduces(index):
                self._reduce(self.units[index])

    def finish_backward(self) -> None:
        """Reduce the units that did not complete on this rank, with zeros for missing gradients. Collective over `shard`."""
        for index in self.order.rest():
            if self.reduces(index):
                self._reduce(self.units[index])
        # Reentrant checkpointing runs a separate backward per call of a unit: reduce gradients of later calls too.
        for unit in self.units:
            if self.reduces(unit.index) and any(g.window.has_some for g in unit.trainable):
                self._reduce(unit)

    def has_room(self, unit: ShardUnit) -> bool:
        """Whether the reduction of `unit` fits beside the reductions in flight."""
        return not self._in_flight or self._numel(unit) + sum(n for _, n, _ in self._in_flight) <= self.max_numel

    @staticmethod
    def _numel(unit: ShardUnit) -> int:
        return sum(g.layout.numel for g in unit.trainable)

    def _reduce(self, unit: ShardUnit) -> None:
        # The oldest first: it was issued first on every rank, so it ends first.
        while not self.has_room(unit) or len(self._in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._in_flight.popleft()[-1].wait()
        if any(id(group) in self._followed for group in unit.trainable):
            self.drain()  # one more backward than announced adds to a gradient that a collective is combining
        with named(f"reduce the gradients of {unit.words}"):
            for group in unit.trainable:
                handle = group.reduce()
                # Only the last reduction of a window has all of the gradient, so only that one is combined over further axes.
                if unit.index in self.finishing:
                    handle = self._finished(group, handle)
                self._in_flight.append((group, group.layout.numel, handle))
        # DeepSpeed's `overlap_comm: false`: nothing computes while gradients travel.
        if not self.max_numel:
            self.drain_reductions()

    def _finished(self, group: FlatGroup, handle: Handle) -> Handle:
        """Add the follow-up of a group's last reduction of the window: further axes, or the optimizer step in backward."""
        if group.axes.then:
            # A second backward would add to the shard that the collective is reading (see `_reduce`).
            self._followed.add(id(group))
            # As a follow-up of the reduce-scatter's handle: the host need not wait between the two axes.
            return Handle([handle], functools.partial(self._combine, group, 0))
        # A group with further axes (above) steps at the window's end: its gradient is not final here.
        if self.listener.now.steps_in_backward:
            return Handle([handle], functools.partial(self._final, group))
        return handle

    def _combine(self, group: FlatGroup, index: int) -> None:
        """Combine the window's gradient of `group` over its further axes from `index` on; the earlier ones are done."""
        if index == len(group.axes.then) or self._dropping:
            return
        row = group.axes.then[index]
        # Several ranks hold these weights (tied ones of two stages), and each ends its backwards at another time.
        if row.at_end:  # so are all later rows
            waiting = [(group, later) for later in group.axes.then[index:]]
            self._at_end += [pair for pair in waiting if pair not in self._at_end]  # several schedules may have run
        else:
            self._note_sum(group, row)
            # A scatter holds the gradient of the shard, which is larger than what is left of it. The others are in place.
            while row.operation == "scatter" and len(self._combining) >= MAX_REDUCTIONS_IN_FLIGHT:
                self._combining.popleft().wait()
            self._combining.append(Handle([combine(group, row)], functools.partial(self._combine, group, index + 1)))

    def _note_sum(self, group: FlatGroup, row: Combination) -> None:
        # After the sum every rank has the total. If backward goes on, all but the first begin at zero, or it counts twice.
        if row.operation == "sum" and row.axis.rank > 0:
            self._added_up.append(group)

    def _final(self, group: FlatGroup) -> None:
        if not self._dropping:
            self.listener.now.gradient_final(group)

    def reduce_rest(self) -> None:
        """Reduce the gradients left by backwards that were not announced as the last of the window. Collective over dp."""
        rest = [unit for unit in reversed(self.units) if unit.trainable and unit.index in self._unfinished]
        self._unfinished.clear()
        # A loop that announced every backward as not the last (`no_sync`) and then steps: the window ends here all the same.
        self.finishing = range(len(self.units))
        for unit in rest:
            # At stages 0 and 1 gradients wait unreduced in the window's buffer; at 2 and 3 each backward has reduced them.
            if self.placements.grads is not Placement.SHARD:
                self._reduce(unit)
                continue
            for group in unit.trainable:  # already reduced in each backward
                self._in_flight.append((group, 0, self._finished(group, Handle([]))))
        self.finish()
        for unit in self.units:
            # After the reductions: what user code assigned is the gradient of all ranks, which must not be averaged again.
            for group in unit.trainable:
                if group.access is not None:
                    group.access.adopt()

    def to_combine(self, group: FlatGroup) -> list[Combination]:
        """The combinations that the gradient of `group` still awaits at the end of the window. Local."""
        return [row for waiting, row in self._at_end if waiting is group]

    def complete_beside(self) -> list[FlatGroup]:
        """Groups with a complete gradient while other reductions are in flight; empty if none is in flight. Local."""
        if not self._in_flight:
            return []
        # These can be stepped, or measured for the norm, while the others travel.
        flying = {id(group) for group, _, _ in self._in_flight}
        done = (unit for unit in self.units if unit.index not in self._unfinished)
        return [g for unit in done for g in unit.trainable if id(g) not in flying and not g.axes.then]

    def drain_reductions(self) -> None:
        """Wait for the reductions in flight. Local."""
        while self._in_flight:
            self._in_flight.popleft()[-1].wait()

    def drain(self) -> None:
        """Wait until no reduction, combination or transfer to the host is in flight. Local."""
        self.drain_reductions()
        while self._combining:
            self._combining.popleft().wait()
        self._followed.clear()
        # Gradients on the host: the copies from the device are under way when the reductions are done.
        self.link.wait_host()

    def finish(self) -> None:
        """`drain`, then run the combinations that waited for the end of the window.

        Collective over the axes of those combinations (for weights that several ranks of one copy of the model hold), once per
        window; without any, local.
        """
        self.drain()
        # Sorted by name, so that all stages agree: they reduced their units in different orders.
        waiting = sorted(self._at_end, key=lambda pair: pair[0].layout.slots[0].name)
        together: dict[object, tuple[Combination, list[FlatGroup]]] = {}
        for group, row in waiting:
            # Stages hold different sets of tied weights. Joined in one message, their lengths would differ from stage to stage.
            alone = group.layout.slots[0].name if row.between_stages else ""
            key = (id(row.axis), row.operation, group.gradient.dtype, alone)
            together.setdefault(key, (row, []))[1].append(group)
            self._note_sum(group, row)
        for row, groups in together.values():
            combine_together(groups, row).wait()
        self._at_end.clear()
        self.link.wait_host()

    def drop(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, or set those that exist to zero. Local."""
        # A follow-up would send what nobody wants, and ranks that raised elsewhere would send other numbers of them.
        self._dropping = True  # skip the follow-ups of reductions
        try:
            self.drain()
        finally:
            self._dropping = False
        self._at_end.clear()  # these collectives have not started and are no longer needed
        self._unfinished.clear()
        self._added_up.clear()
        for unit in self.units:
            for group in unit.trainable:
                group.drop_gradients(set_to_none)
