"""Gathers at their turn and ahead of it, so that the next unit's weights travel while this one computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_dist.memory.offload.resting import Tier
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.order import IssueOrder
from hf_dist.sharding.unit import ShardUnit


class Prefetch:
    """Starts the gathers of a pass in the common order."""

    def __init__(self, units: Sequence[ShardUnit], storage: Storage, limit: int) -> None:
        """`limit`: elements gathered ahead of their use; 0 gathers each unit at its turn."""
        self.units = units
        self.storage = storage
        self.limit = limit

    def issue(self, indices: Iterable[int]) -> None:
        """Start to gather these units. Collective over the shard axes."""
        for index in indices:
            self.units[index].unshard()

    def ahead(self, order: IssueOrder, current: int | None) -> None:
        """Gather while `current` computes: the next unit, and more while the limit on weights in flight allows.

        `current` is None at the start of a pass. Collective over the shard axes.
        """
        ahead = sum(self.units[i].numel for i in order.ahead_of(current)) if order.peek() is not None else 0
        while self.limit and (index := order.peek()) is not None:
            unit = self.units[index]
            if ahead and ahead + unit.numel > self.limit:
                break
            order.advance()
            unit.unshard()
            ahead += unit.numel
        if self.storage.params.tier is Tier.DISK:
            self._read_ahead(order)

    def _read_ahead(self, order: IssueOrder) -> None:
        """Start to read the units after those from disk, in the order of their gathers."""
        numel, count = self.storage.ahead_numel, self.storage.ahead_count
        for unit in (self.units[i] for i in order.upcoming()):
            numel -= sum(g.layout.shard_numel for g in unit.groups)
            count -= len(unit.groups)
            if numel < 0 or count < 0:
                return
            unit.fetch()
