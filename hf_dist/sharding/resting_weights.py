"""The weights of one group between uses: the masters that are stepped, and what the gathers read.

Two tensors may hold the same weights, so each has a version, which is that of the masters when it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.memory.offload.resting import Tier, opened
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.at_rest import GroupAtRest
from hf_dist.sharding.hpz import SecondCopy
from hf_dist.sharding.pieces import gather_pieces
from hf_dist.sharding.states import States
from hf_dist.tensors.codecs import Codec


class RestingWeights:
    """This rank's masters and gather input of one group."""

    def __init__(
        self,
        plan: GroupAtRest,
        states: States,
        second: SecondCopy | None,
        storage: Storage,
        outer: Sequence[MeshAxis] = (),
    ) -> None:
        """`states`: the tensors of the plan; `second`: another source of the gathers, among neighbours; `outer`: axes of
        copies, each of which has a piece of the masters."""
        self.plan = plan
        self.shard = states.shard
        """What the gathers read."""
        self.master = states.master
        """What is stepped; often the same object."""
        self.second = second
        self.storage = storage
        self.version = 0
        """How often the weights have changed."""
        self._shard_version = 0
        self._delivered = None if plan.wires.of_products else plan.wires.weights
        """The codec in which the full weights of now have arrived."""
        self._encoded: torch.Tensor | None = None
        """Memory for the shard as it is sent, if that is kept until the weights change."""
        self._is_encoded = False
        self._outer = outer
        self._spreading: collectives.Handle | None = None

    def own(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of `shard` (what the gathers read, 1-D) that the masters are cast into, for who writes it. Local."""
        self.arrive()  # a unit that nothing has gathered since may still be sent
        start, stop = (edge - self.plan.gathered[0] for edge in self.plan.interval)
        return shard[start:stop]

    @property
    def in_full(self) -> bool:
        """Whether the masters are a part of the full weights, so that a write into these is one into the masters."""
        return not self.plan.separate and self.master is self.shard

    @property
    def as_products(self) -> bool:
        """Whether the full weights have arrived as products in float8 round them."""
        return self.plan.wires.of_products and self._delivered is not None

    @property
    def encoded_nbytes(self) -> int:
        """Bytes of the shard as it is sent, from the first gather until the weights change."""
        return 0 if self._encoded is None else self._encoded.numel()

    # ------------------------------------------------------------------ changes

    def changed(self) -> None:
        """Note that `master` was written. Local."""
        self.version += 1
        if self.shard is self.master:  # there is no copy that could lag behind
            self._shard_version = self.version
        self.forget_copies()

    def count_change(self) -> None:
        """Note a change of the weights that `master` has, or gets later. Local."""
        self.version, self._shard_version = self.version + 1, self._shard_version + 1
        self._encoded, self._is_encoded = None, False

    @torch.no_grad()
    def adopt(self, full: torch.Tensor) -> None:
        """Copy the elements of `full` (1D, the whole group) that differ into the masters. Local."""
        start, stop = self.plan.interval
        with opened(self.master, changed=True) as masters:
            _take_changed(full[start:stop], masters, lambda values: self.rounded(self._spread_of(values)))
        self.changed()
        if self.plan.is_cut:  # other copies' pieces too, so that nothing is to be sent
            if self.plan.separate:
                with opened(self.shard, changed=True) as shard:
                    _take_changed(full[slice(*self.plan.gathered)], shard, self.rounded)
            self._shard_version = self.version

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What the last gather delivered of `values` (1-D, whole blocks, in the dtype of use). Local."""
        codec = self._delivered
        return values if codec is None else codec.rounded(values)

    def _spread_of(self, values: torch.Tensor) -> torch.Tensor:
        """What other copies get of this rank's piece. Local."""
        codec = self.plan.wires.copies
        crosses = self.plan.is_cut and any(axis.name == "dp_replicate" for axis in self._outer)
        return codec.rounded(values) if codec is not None and crosses else values

    def write_back(self) -> None:
        """Copy the masters into the gather's input, if they were written. Local.

        A copy to the device is asynchronous: call `storage.link.wait_device()` before the next gather.
        """
        if self._shard_version != self.version:
            self.deliver(self.master.get())
            self.master.release()

    def deliver(self, masters: torch.Tensor) -> None:
        """Like `write_back`, for a caller that already holds the master tensor. Local."""
        if self._shard_version == self.version:
            return
        # Before the copy, which is asynchronous: a second caller must not start it again into the same memory.
        self._shard_version = self.version
        with torch.no_grad():
            self.storage.link.deliver(self.own(self.shard.get(blank=not self.plan.is_cut)), masters)
        if self.shard.tier is Tier.DISK:  # the disk write reads host memory, which must be filled first
            self.storage.link.wait_host()
        self.shard.release(changed=True)

    # ------------------------------------------------------------------ gathers

    @torch.no_grad()
    def spread(self) -> None:
        """Start to fill what the gathers read with the pieces that other copies have stepped; the next gather waits for it.

        Collective over the axes of copies, if masters are cut among them; else local. Call `write_back` before it.
        """
        if not self.plan.is_cut:
            return
        self.arrive()
        shard, link = self.shard.get(), self.storage.link
        if shard.device == link.device:
            self._spreading = gather_pieces(shard, self._outer, self.plan.wires.copies)
            return
        # Pieces travel between devices: the shard is there until it is whole.
        values = torch.empty(shard.numel(), dtype=shard.dtype, device=link.device)
        link.deliver(self.own(values), self.master.elements if self.master.tier is Tier.DEVICE else self.own(shard))
        link.wait_device()
        pieces = gather_pieces(values, self._outer, self.plan.wires.copies)
        self._spreading = collectives.Handle([pieces], lambda: link.deliver(shard, values), memory=pieces)

    def arrive(self) -> None:
        """Wait for the pieces of the other copies. Local."""
        if self._spreading is not None:
            self._spreading.wait()
            self._spreading = None

    def fetch(self) -> None:
        """Start to load what the next gather reads into memory, unless it is already there. Local."""
        if self.second is None or not self.second.holds:
            self.shard.fetch()

    def fill(self, full: torch.Tensor, axis: MeshAxis, *, whole: bool = False) -> collectives.Handle:
        """Start to fill `full` (1D, the whole group) from all ranks' parts. Collective over `axis`, or the neighbours.

        `whole`: not in the rounding of products.
        """
        self._delivered = None if whole and self.plan.wires.of_products else self.plan.wires.weights
        if self.second is not None and self.second.holds and self._delivered is self.plan.wires.weights:
            return self.second.gather(full, axis.size)
        codec, wire = self._delivered, None
        if codec is not None:
            # Here, not beside: the computation's stream reads it at the end, and its memory then goes back to that stream.
            nbytes = codec.nbytes(self.plan.gathered[1] - self.plan.gathered[0])
            wire = torch.empty(axis.size, nbytes, dtype=torch.uint8, device=full.device)
            if self.plan.keeps_encoded and self._encoded is None:
                self._encoded = torch.empty_like(wire[0])
        if self._spreading is None:
            return self._fill(full, axis, wire)
        # The next unit's pieces may still be on their way, which this unit's computation must not wait for.
        spreading = self._spreading
        with self.storage.link.aside() as arrival:
            self.arrive()
            gather = self._fill(full, axis, wire)
        return collectives.Handle([gather, *arrival, spreading])  # whose memory is of the computation's stream as well

    def _fill(self, full: torch.Tensor, axis: MeshAxis, wire: torch.Tensor | None) -> collectives.Handle:
        if wire is not None and self._delivered is not None:
            return self._fill_encoded(full, axis, wire, self._delivered)
        if not self.plan.separate:
            return self._all_gather(full, axis)  # in place: this rank's part rests inside of `full`
        start, stop = self.plan.gathered
        values = self.shard.get()
        with self.storage.link.beside(values) as arrival:
            full[start:stop].copy_(values, non_blocking=True)
            gather = self._all_gather(full, axis)
        # Not before the copy has read it: the host memory goes back to a pool, and the next user would overwrite it.
        self.shard.release(after=arrival)
        return collectives.Handle([gather, *arrival])

    def _fill_encoded(self, full: torch.Tensor, axis: MeshAxis, wire: torch.Tensor, codec: Codec) -> collectives.Handle:
        assert self.plan.separate, "masters that are a part of the full weights would be rounded"
        own = wire[axis.rank]
        values = self._encoded if self._is_encoded and self._encoded is not None else self.shard.get()
        with self.storage.link.beside(values) as arrival:
            if self._is_encoded:
                own.copy_(values)
            else:
                weights = values.to(device=full.device, dtype=full.dtype, non_blocking=True)
                codec.encode(weights.view(1, -1), own.view(1, -1))
                self._keep_encoded(own)
            gather = collectives.all_gather(axis, wire.view(-1))
        self.shard.release(after=arrival)

        def finish() -> None:
            codec.decode(wire, full.view(axis.size, -1))
            if self.second is not None:
                self.second.arrived(wire.view(-1))

        return collectives.Handle([gather, *arrival], finish)

    def _keep_encoded(self, own: torch.Tensor) -> None:
        if self._encoded is not None:
            self._encoded.copy_(own)
            self._is_encoded = True

    def _all_gather(self, full: torch.Tensor, axis: MeshAxis) -> collectives.Handle:
        if self.plan.gathered == (0, full.numel()):  # one rank, or a group that is not divided: no collective at all
            return collectives.Handle([])
        return collectives.all_gather(axis, full)

    def keep_second(self, full: torch.Tensor) -> None:
        """Keep this rank's part of the current full weights, of which the next gathers are made. Local."""
        if self.second is not None:
            self.second.keep(full)

    def forget_copies(self) -> None:
        """The next gather reads the shards. At the same moments on all ranks. Local."""
        self._encoded, self._is_encoded = None, False
        if self.second is not None:
            self.second.forget()


def _take_changed(new: torch.Tensor, into: torch.Tensor, arrives: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copy the elements of `new` that differ from what `arrives` of `into` (both 1-D). Local."""
    new = new.to(into.device)
    # Only changed elements: the others keep the low bits that the compute dtype, or the codec, cannot hold.
    torch.where(new == arrives(into.to(new.dtype)), into, new.to(into.dtype), out=into)
