"""Which interval of a flat buffer belongs to which parameter and to which rank. Pure arithmetic.

FlatLayout of one FlatGroup, 4 ranks, offsets aligned to 64 elements

          slot q_proj        slot k_proj   slot o_proj          slot norm  pad
elements |------------------|-------------|--------------------|-----|....|
rank      0        |   1          |     2            |      3             (equal shards; slots may straddle ranks)

fragment of q_proj on rank 1 = interval [start, stop) of its flattened elements

A shard may be cut further into equal pieces, one for each of its copies (`pieces`): the optimizer's part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hf_dist.tensors.tensor_slice import TensorSlice

ALIGNMENT = 64
"""Elements. 128 bytes in bf16: enough for vector loads, for grouped matrix products (16 bytes), and for Inductor."""


@dataclass(frozen=True)
class ParamSlot:
    """The place of one parameter in the flat buffer."""

    name: str
    """Full parameter name in the model (FQN)."""
    held: TensorSlice
    """The slice of the stored parameter that this rank's model has; the buffer holds nothing else of it."""
    offset: int
    """First element in the flat buffer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in memory. Files have `held.whole`."""
        return self.held.shape

    @cached_property
    def numel(self) -> int:
        """Number of elements in memory, 0 for an empty parameter."""
        return self.held.numel

    @property
    def stop(self) -> int:
        """One past the last element in the flat buffer."""
        return self.offset + self.numel

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Interval [start, stop) of [first, last) of the flat buffer, counted from `first`; empty if none of it is there."""
        start = min(max(self.offset, first), last)
        return start - first, max(min(self.stop, last), start) - first


@dataclass(frozen=True)
class FlatLayout:
    """Slots one after another, cut into `num_shards` equal shards."""

    slots: tuple[ParamSlot, ...]
    num_shards: int
    shard_numel: int
    """Elements of one shard, padding included."""
    pieces: int = 1
    """Equal pieces of each shard."""
    alignment: int = ALIGNMENT
    """Elements of which every offset and length is a multiple."""

    @classmethod
    def pack(
        cls,
        parts: Iterable[tuple[str, TensorSlice | tuple[int, ...]]],
        num_shards: int,
        pieces: int = 1,
        alignment: int = ALIGNMENT,
    ) -> FlatLayout:
        """Lay out parameters in the given order; padding is less than `alignment` elements per slot and per piece.

        `parts`: (name, slice kept of the parameter); a plain shape means all of it.
        """
        slots: list[ParamSlot] = []
        end = 0
        for name, part in parts:
            slot = ParamSlot(name, TensorSlice.of(part), _align(end, alignment))
            slots.append(slot)
            end = slot.stop
        piece = _align(-(-end // (num_shards * pieces)), alignment)
        return cls(tuple(slots), num_shards, pieces * piece, pieces, alignment)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.num_shards

    @cached_property
    def num_params(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def shard(self, rank: int) -> tuple[int, int]:
        """Interval [start, stop) of the buffer that `rank` holds when sharded."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    @property
    def piece_numel(self) -> int:
        """Elements of one piece, padding included."""
        return self.shard_numel // self.pieces

    def piece(self, place: int) -> tuple[int, int]:
        """Interval [start, stop) of piece `place`, counted over all shards: the shard itself if it is not cut."""
        return place * self.piece_numel, (place + 1) * self.piece_numel

    def fragment(self, slot: ParamSlot, place: int) -> tuple[int, int]:
        """Interval [start, stop) of the flattened parameter that lies in piece `place`; start == stop when none does."""
        first, last = self.piece(place)
        start = min(max(first, slot.offset), slot.stop)
        stop = min(max(last, slot.offset), slot.stop)
        return start - slot.offset, stop - slot.offset

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Intervals of the buffer that belong to no parameter."""
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                yield end, slot.offset
            end = max(end, slot.stop)
        if end < self.numel:
            yield end, self.numel


def _align(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment
