"""The order in which units are gathered or reduced: the same on every rank, whatever path a rank's data takes.

During the first training step it is the order of registration in the model; then the ranks agree on the order they observed.
Before a rank issues a unit, it issues all earlier units of the order. So a rank whose batch skips a unit (no image for the
vision tower) still takes part in that unit's collectives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


class IssueOrder:
    """An order of unit indices with a cursor for the current pass. Pure bookkeeping, no communication."""

    def __init__(self, order: Iterable[int]) -> None:
        self.seen: list[int] = []  # units this rank reached in the current pass, each once
        self.replace(order)

    def replace(self, order: Iterable[int], unseen: Iterable[int] = ()) -> None:
        """Use another order from the next pass on; `unseen`: units that no rank has used yet, placed last."""
        used = list(order)
        self.last = next((unit for unit in reversed(used) if unit), used[-1] if used else None)
        """The last unit of a pass, apart from the root (0), which stays gathered with it."""
        self._order = [*used, *(unit for unit in unseen if unit not in used)]
        self._position = {unit: i for i, unit in enumerate(self._order)}
        self._cursor = 0

    @property
    def units(self) -> list[int]:
        """The whole order."""
        return self._order

    def restart(self) -> None:
        """Begin a new pass."""
        self._cursor = 0
        self.seen = []

    def reach(self, unit: int) -> list[int]:
        """Units to issue before `unit` can be used, in order, `unit` last; only `unit` if the cursor has passed it."""
        if unit not in self.seen:
            self.seen.append(unit)
        position = self._position.get(unit, -1)
        if position < self._cursor:
            return [unit]
        todo = self._order[self._cursor : position + 1]
        self._cursor = position + 1
        return todo

    def ahead_of(self, unit: int | None) -> list[int]:
        """Units after `unit` that were already issued."""
        position = None if unit is None else self._position.get(unit)
        return [] if position is None else self._order[position + 1 : self._cursor]

    def peek(self) -> int | None:
        """The next unit to issue; None at the end."""
        return self._order[self._cursor] if self._cursor < len(self._order) else None

    def upcoming(self) -> list[int]:
        """Units still to be issued in this pass, in order."""
        return self._order[self._cursor :]

    def advance(self) -> None:
        """Move the cursor past the unit that `peek` returned."""
        self._cursor += 1

    def rest(self) -> list[int]:
        """End the pass and return the units that were not issued in it."""
        todo = self._order[self._cursor :]
        self._cursor = len(self._order)
        return todo


class PassOrders:
    """The orders of one kind of pass: through the whole model, or through one pipeline stage of it."""

    def __init__(self, units: Iterable[int], in_backward: Container[int], trainable: Container[int]) -> None:
        """`units`: units of the pass, 0 (the root) first; `in_backward`: units whose weights the backward reads."""
        self.units = list(units)
        self.forward = IssueOrder(self.units)
        self.backward = IssueOrder([0, *(u for u in reversed(self.units[1:]) if u in in_backward)])
        self.reduce = IssueOrder([u for u in reversed(self.units) if u in trainable])
        self.agreed = False
        self._in_backward = in_backward
        self._trainable = trainable

    def agree(self, everyone: Sequence[Sequence[Sequence[int]]]) -> None:
        """From the next pass on, use the orders that the ranks observed. `everyone`: `seen()` of every rank. Local."""
        self.agreed = True
        forward, backward, reduce = (merge([ranks[k] for ranks in everyone]) for k in range(3))
        # No rank has used these units yet. When one rank's data does, all ranks must take part.
        unused = [u for u in self.units if u not in forward]
        self.forward.replace(forward, unused)
        self.backward.replace(backward, (u for u in reversed(unused) if u in self._in_backward))
        self.reduce.replace(reduce, [u for u in reversed(self.units) if u in self._trainable])

    def seen(self) -> tuple[list[int], list[int], list[int]]:
        """Units that this rank reached in its last pass: in forward, in backward, and reduced."""
        return self.forward.seen, self.backward.seen, self.reduce.seen


def merge(orders: Sequence[Sequence[int]]) -> list[int]:
    """Merge all ranks' orders into one, the same on every rank: the first rank's order, with each unit that only later ranks
    saw placed right after its predecessor there. Placed at the end, such a unit would wait until all others are gathered."""
    merged: list[int] = []
    for order in dict.fromkeys(map(tuple, orders)):  # thousands of ranks share a few distinct orders
        place = 0
        for unit in order:
            if unit not in merged:
                merged.insert(place, unit)
            place = merged.index(unit) + 1
    return merged
