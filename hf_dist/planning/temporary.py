"""Weights gathered for use, and what a backward adds to states at rest: its gradients in flight, waiting and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.config import settled
from hf_dist.planning.planned_unit import PlannedUnit
from hf_dist.planning.state_bytes import States
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.reducer import MAX_REDUCTIONS_IN_FLIGHT


@dataclass(frozen=True)
class Temporary:
    """Bytes on one rank besides states at rest."""

    states: States

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, how exact), without zero rows."""
        kept = self.states.kept_nbytes
        rows = [
            ("weights gathered for use", self.gathered - kept, "estimate"),
            ("weights kept gathered", kept, "at most"),
        ]
        return [row for row in rows if row[1]]

    @property
    def gathered(self) -> int:
        """Most bytes of full weights in memory at the same time, in addition to states at rest."""
        others = self.states.units[1:]
        used = max(self._used(o, k) for o in (others, others[::-1]) for k in range(max(1, len(others))))
        return self.states.kept_nbytes + used

    @property
    def after_step(self) -> int:
        """Bytes of encoded messages after a step: where weights rest whole, all units' arrive before the next forward."""
        whole = self.states.placements.params is not Placement.SHARD
        return self._encoded(self.states.units) if whole else 0

    @property
    def gathered_at_loss(self) -> int:
        """Bytes gathered at the start of backward: kept units, root, last unit, what is prefetched after the root."""
        root, *others = self.states.units
        backward = [u for u in others[::-1] if u.needed_in_backward]
        arriving = self._prefetched(backward) or backward[:1]
        return self.states.kept_nbytes + self._gathered([root, *arriving]) + self._encoded(arriving)

    def _used(self, order: Sequence[PlannedUnit], k: int) -> int:
        """Bytes of the root, unit k of a pass in this `order`, and what is prefetched while it computes, without kept units."""
        arriving = [*order[k : k + 1], *self._prefetched(order[k + 1 :])]
        return self._gathered([self.states.units[0], *arriving]) + self._encoded(arriving)

    def _gathered(self, units: Sequence[PlannedUnit]) -> int:
        """Bytes of those units that are sharded and kept only for their use."""
        return sum(u.nbytes for u in units if self.states.stay(u) is Stay.USE)

    def _encoded(self, units: Sequence[PlannedUnit]) -> int:
        """Bytes of the encoded messages from which these weights are decoded."""
        return sum(u.encoded for u in units)

    def _prefetched(self, following: Sequence[PlannedUnit]) -> list[PlannedUnit]:
        """The next units of a pass that are prefetched: one, and more while they fit into the bucket."""
        limit = settled(self.states.config.zero_optimization.stage3_prefetch_bucket_size)
        ahead: list[PlannedUnit] = []
        for unit in following if limit else ():
            if ahead and sum(u.numel for u in ahead) + unit.numel > limit:
                break
            ahead.append(unit)
        return ahead

    def newest(self, passes: int) -> int:
        """Most bytes of the gradient of one parameter that autograd has just created, and of what a block's backward has there
        at the same time (`passes`); the root's backward has none of the latter."""
        root, *others = self.states.units
        return max(root.newest, *(u.newest + passes * u.needed_in_backward for u in others))

    def backward(self, activations: int, recomputed: int, *, accumulated: bool) -> int:
        """Maximum over the sequence of units: gathered weights, activations, and gradients in flight and reduced.

        `activations`: bytes at the start, divided equally over the units; `recomputed`: bytes that the current block
        adds; `accumulated`: reduced gradients of earlier microbatches exist. The root begins with the head. If it ends
        with an embedding, its gradients stay in flight.
        """
        root, blocks = self.states.units[0], self.states.units[:0:-1]
        order = [*blocks, root] if root.stands_first else [root, *blocks]
        waits = self.states.flying(root.learning) if root.stands_first else 0
        sent = [0 if waits and u is root else u.learning for u in order]
        whole = sum(u.awaiting for u in self.states.units)
        # Copies combine these while the next units compute.
        combined = MAX_REDUCTIONS_IN_FLIGHT * max(u.awaiting for u in order) if self.states.cuts_copies else 0
        kept, reduced, most = self.states.kept_nbytes, 0, 0
        for k, unit in enumerate(order):
            done = k if root.stands_first else max(0, k - 1)  # blocks
            stepped = sum(u.reduced for u in order[: max(0, k - 1)]) if self.states.frees_gradients else 0
            left = activations * (len(blocks) - done) // max(1, len(blocks))
            if unit is root and not k:
                used = self.gathered_at_loss - self.states.kept_nbytes
            else:  # a root behind the blocks has released its weights together with its gradients
                stays = [] if root.learning and not root.stands_first else [root]
                read = [u for u in blocks[done:] if u.needed_in_backward]
                arriving = [*read[:1], *self._prefetched(read[1:])]
                used = self._gathered([*stays, *arriving]) + self._encoded(arriving)
            here = kept + used + waits + left + (whole if accumulated else reduced + combined) - stepped
            passes = recomputed if unit is not root and unit.needed_in_backward else 0
            most = max(most, here + self._of_unit(unit, self.in_flight(sent[:k]), sent[k], passes))
            reduced += unit.reduced
            kept -= unit.nbytes if self.states.stay(unit) is Stay.BACKWARD else 0
        return most

    def _of_unit(self, unit: PlannedUnit, flying: int, numel: int, passes: int) -> int:
        """Most bytes of a unit's gradient, of those in flight (`flying` elements), and of the tensors that its backward adds.

        `passes`: bytes present at its start. If its gradient does not fit beside those in flight, it waits in the dtype of the
        weights: it grows while `passes` shrinks, and moves when the weights are freed and the others are reduced.
        """
        fly = self.states.flying
        most = settled(self.states.config.zero_optimization.reduce_bucket_size)
        if not flying or flying + numel <= most:
            return fly(flying + numel) + passes + unit.newest
        waiting = numel * self.states.precision.compute.itemsize
        freed = unit.nbytes if unit.needed_in_backward and self.states.stay(unit) is not Stay.WINDOW else 0
        return max(fly(flying) + max(passes, waiting) + unit.newest, waiting + fly(max(flying, numel)) - freed)

    def in_flight(self, sent: Sequence[int]) -> int:
        """Elements in flight once the last of the units `sent` is with the reducer, which waits for earlier ones."""
        zero = self.states.config.zero_optimization
        if zero.overlap_comm is False or not (most := settled(zero.reduce_bucket_size)):
            return 0
        held = 0
        for numel in sent[: -MAX_REDUCTIONS_IN_FLIGHT - 1 : -1]:
            if held and held + numel > most:
                break
            held += numel
        return held
