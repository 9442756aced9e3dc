"""Collectives whose messages are encoded: all-gather, reduce-scatter and all-reduce of 1-D tensors in a wire codec.

    all-gather       encode the own part | all-gather of bytes | decode all parts, the own one as well
    reduce-scatter   encode every part   | all-to-all of bytes | decode one part of each rank, add in fp32 in rank order
    two hops         the same inside the machine, then between machines with what the first hop has added up
    all-reduce       reduce-scatter, then all-gather of the means

All ranks decode the same bytes, so copies of the weights stay equal bit for bit. Bytes that a rank sends are those of
`Codec.nbytes` for each part that it sends. Source: ZeRO++ (Wang et al. 2023, arXiv 2306.10209), sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from hf_dist.dist import collectives
from hf_dist.dist.collectives import Handle
from hf_dist.dist.mesh import MeshAxis
from hf_dist.tensors.codecs import Codec

__all__ = ["Residual", "Tails", "Wire", "all_gather", "all_reduce", "reduce_scatter"]


class Residual:
    """What the last message has left out of its numbers, which is added to the next one (error feedback).

    Source: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        """fp32, in the shape of the message; None before the first one."""

    def added(self, values: torch.Tensor) -> torch.Tensor:
        """`values` and the rest of the last message, in fp32: a new tensor. Local."""
        if self.values is None:
            return values.float() if values.dtype != torch.float32 else values.clone()
        return self.values + values

    def keep(self, message: torch.Tensor, wire: torch.Tensor, codec: Codec) -> None:
        """Keep what `wire` does not have of `message` (fp32, which is taken). Local."""
        arrived = torch.empty_like(message)
        codec.decode(wire, arrived)
        # A step with inf or NaN is skipped: what was left out of it must not spoil the next one.
        self.values = message.sub_(arrived).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def multiply(self, factor: float) -> None:
        """Multiply the rest, where the unit of the numbers changes. Local."""
        if self.values is not None:
            self.values.mul_(factor)


@dataclass(frozen=True, eq=False)
class Tails:
    """The blocks of a message that a parameter does not fill: what is behind its end belongs to nothing.

    A codec of one bit has no zero. So these places are sent as the mean magnitude of their block's elements: that arrives as it
    was, and is the scale that the elements would have alone.
    """

    blocks: torch.Tensor
    """Numbers of the blocks, int64 (k,)."""
    own: torch.Tensor
    """Whether an element belongs to a parameter, bool (k, block)."""

    @classmethod
    def of(cls, gaps: Iterable[tuple[int, int]], part: tuple[int, int], block: int) -> Tails:
        """Of the interval `part` of a flat buffer with these gaps; blocks begin at `part`. Local."""
        first, last = part
        own: dict[int, torch.Tensor] = {}
        for start, stop in gaps:
            for at in range(max(start, first) - first, min(stop, last) - first):
                own.setdefault(at // block, torch.ones(block, dtype=torch.bool))[at % block] = False
        kept = sorted(number for number, mask in own.items() if mask.any())
        return cls(
            torch.tensor(kept, dtype=torch.int64),
            torch.stack([own[k] for k in kept]) if kept else torch.ones(0, block, dtype=torch.bool),
        )

    def fill(self, message: torch.Tensor) -> None:
        """Write the places of `message` (fp32, contiguous) that belong to nothing. Local."""
        if not len(self.blocks):
            return
        blocks, own = (t.to(message.device) for t in (self.blocks, self.own))
        rows = message.view(-1, own.shape[1])
        some = rows[blocks]
        means = (some.abs() * own).sum(-1, keepdim=True) / own.sum(-1, keepdim=True)
        rows[blocks] = torch.where(own, some, means)


@dataclass(eq=False)
class Wire:
    """How the messages of one tensor travel along one axis: the codec, and what it has left out."""

    codec: Codec
    feedback: bool = False
    """Whether what a message leaves out is added to the next one."""
    hops: tuple[MeshAxis, MeshAxis] | None = None
    """(ranks of a machine, ranks of this place in every machine): a reduction adds up inside of the machine first."""
    of_gradients: bool = True
    """Whether it carries gradients, whose unit changes with the loss scale; movements have none."""
    residuals: dict[str, Residual] = field(default_factory=dict)
    """By message."""
    tails: Mapping[str, Tails] = field(default_factory=dict)
    """By message, for codecs without a zero."""

    def multiply(self, factor: float) -> None:
        """Multiply what messages have left out, where the unit of gradients changes. Local."""
        for residual in self.residuals.values() if self.of_gradients else ():
            residual.multiply(factor)

    def all_reduce(self, axis: MeshAxis, tensor: torch.Tensor) -> Handle:
        """Average `tensor` (1-D) in place. Collective over `axis`."""
        return all_reduce(axis, tensor, self)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of what messages have left out."""
        held = (residual.values for residual in self.residuals.values())
        return sum(values.numel() * values.element_size() for values in held if values is not None)

    def encoded(self, message: str, values: torch.Tensor) -> torch.Tensor:
        """`values` ((rows, n), floating) on the wire, uint8 (rows, nbytes); `message`: whose rest is added. Local."""
        wire = torch.empty(len(values), self.codec.nbytes(values.shape[1]), dtype=torch.uint8, device=values.device)
        if not self.feedback:
            self.codec.encode(values, wire)
            return wire
        residual = self.residuals.setdefault(message, Residual())
        whole = residual.added(values)
        if message in self.tails:
            self.tails[message].fill(whole)
        self.codec.encode(whole, wire)
        residual.keep(whole, wire, self.codec)
        return wire


def all_gather(axis: MeshAxis, own: torch.Tensor, full: torch.Tensor, codec: Codec) -> Handle:
    """Fill `full` (1-D, `axis.size` equal parts) with what arrives of every rank's `own` (1-D, a part).

    Collective over `axis`.
    """
    wire = torch.empty(axis.size, codec.nbytes(own.numel()), dtype=torch.uint8, device=own.device)
    codec.encode(own.view(1, -1), wire[axis.rank : axis.rank + 1])
    gather = collectives.all_gather(axis, wire.view(-1))
    return Handle([gather], lambda: codec.decode(wire, full.view(axis.size, -1)), memory=wire)


def reduce_scatter(axis: MeshAxis, full: torch.Tensor, out: torch.Tensor, wire: Wire) -> Handle:
    """Average every rank's `full` (1-D, `axis.size` equal parts) over `axis`; each rank gets its part in `out`.

    Collective over `axis`, or over one of `wire.hops` after the other. `full` may be freed when this returns.
    """
    part = out.numel()
    sent = wire.encoded("parts", full.view(axis.size, part))
    if wire.hops is None:
        return _summed(axis, sent, out.view(1, part), wire.codec, 1.0 / axis.size)
    near, far = wire.hops
    # Ranks of a machine are adjacent: rows (machine, place). Each rank adds up the parts of its place in every machine.
    sent = sent.view(far.size, near.size, -1).transpose(0, 1).reshape(near.size, -1)
    partial = torch.empty(far.size, part, dtype=torch.float32, device=full.device)
    first = _summed(near, sent, partial, wire.codec, 1.0)

    def between() -> None:
        _summed(far, wire.encoded("sums", partial), out.view(1, part), wire.codec, 1.0 / axis.size).wait()

    return Handle([first], between)


def _summed(axis: MeshAxis, sent: torch.Tensor, out: torch.Tensor, codec: Codec, factor: float) -> Handle:
    """Send row r of `sent` to rank r; `out` ((k, n)) becomes the sum of what arrives, k messages a rank, times `factor`."""
    received = torch.empty_like(sent)
    rows = [1] * axis.size
    handle = collectives.all_to_all(axis, sent, received, rows, rows, reduces=True)

    def finish() -> None:
        codec.decode_sum(received.view(axis.size, len(out), -1), out, factor)

    return Handle([handle], finish)


def all_reduce(axis: MeshAxis, tensor: torch.Tensor, wire: Wire) -> Handle:
    """Average `tensor` (1-D) in place over `axis`. Collective over `axis`.

    It is cut into `axis.size` parts of whole blocks; what is missing in the last one is sent as zeros.
    """
    size, numel = axis.size, tensor.numel()
    part = -(-numel // (size * wire.codec.block)) * wire.codec.block
    whole = part * size == numel
    full = tensor if whole else torch.nn.functional.pad(tensor, (0, part * size - numel))
    mean = torch.empty(part, dtype=torch.float32, device=tensor.device)
    scattered = reduce_scatter(axis, full, mean, wire)

    def gather() -> None:
        rows = torch.empty(size, wire.codec.nbytes(part), dtype=torch.uint8, device=tensor.device)
        rows[axis.rank] = wire.encoded("means", mean.view(1, part))[0]
        collectives.all_gather(axis, rows.view(-1), reduces=True).wait()
        wire.codec.decode(rows, full.view(size, part))
        if not whole:
            tensor.copy_(full[:numel])

    return Handle([scattered], gather)
