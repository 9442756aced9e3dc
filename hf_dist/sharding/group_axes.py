"""Over which axis a flat group is sharded and over which its gradient is then combined: one row per kind of weights.

    weights                          sharded over    then, once per window
    dense                            shard           mean over dp_replicate and cp_replicate (HSDP)
    held by several pipeline stages  shard           the same, then the sum over their holders
    experts, cut along ep            edp             as dense; the sum over tp where tp cuts other weights
    not cut along tp, beside others  shard           the same, then over tp: the mean if each rank has the whole
    that are (norms)                                 gradient, the sum if each has a part of it

Every reduction averages the gradient over the group's shard axis. The other entries of the row run once the gradient of the
window is complete. An axis of one rank is left out. If masters are cut among the copies (`StatePlacements.copies`), each "mean
over" an axis of copies is a reduce-scatter: a rank keeps its piece of the mean and steps it (`pieces.py`). An expert's gradient
is already the sum over the tokens of all ranks of `ep`, so its mean over `edp` is divided by the size of `ep` to equal a mean
over `shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hf_dist.dist.axes import Axes
from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.sharding.placement import Placement

Operation = Literal["mean", "sum", "scatter"]
"""What is done to the gradient; "scatter": the mean, of which each rank keeps its piece."""

DENSE: tuple[tuple[str, Operation], ...] = (("dp_replicate", "mean"), ("cp_replicate", "mean"))
"""(axis of the mesh, operation) for weights that are whole on their ranks, after the reduction over `shard`."""


def pieces_of(axes: Axes, over_copies: Placement) -> int:
    """Number of pieces of a shard's masters, one for each of its copies; 1 if each copy has all of them. Pure arithmetic."""
    return math.prod(axes.size(name) for name, _ in DENSE) if over_copies is Placement.SHARD else 1


@dataclass(frozen=True)
class Cut:
    """How groups are sharded whose parameters are cut along an axis, so that its ranks hold the other slices."""

    shard: str
    """The axis that each slice is sharded over."""
    whole: str
    """The view whose ranks together hold every shard of every slice exactly once."""
    added_up: bool
    """Whether a slice's gradient is already the sum of all the axis's ranks' contributions."""


CUTS: Mapping[str, Cut] = {
    "ep": Cut("edp", whole="shard", added_up=True),
    "tp": Cut("shard", whole="shard", added_up=False),  # `whole` is never used where `model` has other ranks
}
"""Axis name -> its rules."""


@dataclass(frozen=True, eq=False)
class Combination:
    """One more axis over which the window's gradient is combined."""

    axis: MeshAxis
    operation: Operation
    at_end: bool = False
    """Whether it waits for the end of the window, where all groups are combined at once. Else it starts as soon as the previous
    reduction is complete. Until the end, ranks of other pipeline stages issue different collectives."""
    between_stages: bool = False
    """Whether its ranks are pipeline stages, which must also exchange which parameters had a gradient."""

    @property
    def between_copies(self) -> bool:
        """Whether its messages are those of `Wires.copies`: copies of a shard, on other machines."""
        return self.axis.name == "dp_replicate"


@dataclass(frozen=True, eq=False)
class GroupAxes:
    """The axes of one flat group."""

    shard: MeshAxis
    """The axis over which weights, gradients and optimizer states are sharded, as their placements say."""
    then: tuple[Combination, ...] = ()
    """Combinations in order, each over more than one rank; those `at_end` come last."""
    parts: MeshAxis | None = None
    """The axis whose ranks hold the other slices of the parameters; None for whole parameters."""
    whole: MeshAxis | None = None
    """The axis whose ranks together hold all slices and pieces of the parameters; None where that is `shard`."""
    divisor: int = 1
    """Further divisor of the mean over `shard`."""
    second: MeshAxis | None = None
    """Neighbours on `shard` that together keep a second copy of the weights; None without a second copy."""
    hops: tuple[MeshAxis, MeshAxis] | None = None
    """(ranks of a machine on `shard`, ranks of this place in every machine), for encoded reductions in two hops."""

    @property
    def is_alone(self) -> bool:
        """Whether each parameter has a flat group of its own: experts that no other rank of `shard` holds. Nothing is sent, so
        a shared buffer saves no message, and the gradient that autograd makes can be used without a copy."""
        return self.divisor > 1 and self.shard.size == 1

    @property
    def owns(self) -> bool:
        """Whether this rank counts its shard in norms and writes it to files: it is the first along every axis of copies."""
        return all(row.axis.rank == 0 for row in self.then if row.operation != "scatter")

    @cached_property
    def outer(self) -> tuple[MeshAxis, ...]:
        """Axes of copies, each of which has a piece of the shard's masters, gradients and optimizer states; often none."""
        return tuple(row.axis for row in self.then if row.operation == "scatter")

    @property
    def pieces(self) -> int:
        """Number of pieces of a shard."""
        return math.prod(axis.size for axis in self.outer)

    @property
    def place(self) -> int:
        """This rank's piece, counted over all shards; its shard if that is not cut."""
        place = self.shard.rank
        for axis in self.outer:
            place = place * axis.size + axis.rank
        return place

    @property
    def among(self) -> tuple[MeshAxis, ...]:
        """The axes over which a sum has each element of the masters once."""
        return (self.shard, *self.outer)

    @property
    def holders(self) -> MeshAxis:
        """The one axis whose ranks together hold the masters of every parameter: `shard`, or all ranks with the same weights.

        Experts that are spread have none if masters are cut among copies: `whole` has the ranks of other experts, too."""
        return self.shard if not self.outer else (self.whole or self.shard)

    def place_of(self, rank: int) -> int:
        """The piece that a rank of `holders` has."""
        copy, shard = divmod(rank, self.shard.size)
        return shard * self.pieces + copy

    @property
    def of_frozen(self) -> GroupAxes:
        """The axes of weights that are not stepped: every copy has its whole shard."""
        if not self.outer:
            return self
        then = tuple(replace(row, operation="mean") if row.operation == "scatter" else row for row in self.then)
        return replace(self, then=then)

    @property
    def is_first_holder(self) -> bool:
        """Whether no earlier pipeline stage holds the same weights."""
        return all(row.axis.rank == 0 for row in self.then if row.between_stages)


def held_between_stages(holders: MeshAxis) -> Combination:
    """The combination for weights that several pipeline stages hold: a sum over `holders`."""
    return Combination(holders, "sum", at_end=True, between_stages=True)


def axes_by_name(
    mesh: ParallelMesh,
    copies: Mapping[str, Sequence[Combination]] | None = None,
    cuts: Mapping[str, str] | None = None,
    second: MeshAxis | None = None,
    over_copies: Placement = Placement.REPLICATE,
    hops: tuple[MeshAxis, MeshAxis] | None = None,
) -> Callable[[str], GroupAxes]:
    """A function from parameter name to its axes. Parameters that may share a group get the same object.

    `copies`: further combinations, by name, for copies of a parameter on ranks whose other weights differ; `cuts`: the axis,
    by name, that a parameter is cut along; `second`: ranks that together keep a second copy of what is sharded over `shard`;
    `over_copies`: `StatePlacements.copies`; `hops`: `GroupAxes.hops` of what is sharded over `shard`.
    """
    copies, cuts = copies or {}, cuts or {}
    scatters = over_copies is Placement.SHARD
    further = [Combination(mesh.views[name], "scatter" if scatters else operation) for name, operation in DENSE]
    near = (second, hops)
    dense = _row(mesh, near, further)
    rows: dict[object, GroupAxes] = {}
    own: dict[str, GroupAxes] = {}
    for name in {**copies, **cuts}:
        more, along = copies.get(name, ()), cuts.get(name, "")
        key = (along, *((id(c.axis), c.operation) for c in more))
        if key not in rows:
            then = [*further, *more]
            rows[key] = _cut_row(mesh, near, along, then) if along else _row(mesh, near, then)
        own[name] = rows[key]
    return lambda name: own.get(name, dense)


Near = tuple[MeshAxis | None, tuple[MeshAxis, MeshAxis] | None]
"""`GroupAxes.second` and `GroupAxes.hops`."""


def _row(mesh: ParallelMesh, near: Near, then: Sequence[Combination]) -> GroupAxes:
    row = GroupAxes(mesh.shard, tuple(c for c in then if c.axis.size > 1), second=near[0], hops=near[1])
    return replace(row, whole=mesh.dp) if row.outer else row


def _cut_row(mesh: ParallelMesh, near: Near, along: str, then: Sequence[Combination]) -> GroupAxes:
    cut, parts = CUTS[along], mesh.views[along]
    divisor = parts.size if cut.added_up else 1
    row = _row(mesh, near if cut.shard == "shard" else (None, None), then)
    whole = row.whole or mesh.views[cut.whole]
    return replace(row, shard=mesh.views[cut.shard], parts=parts, whole=whole, divisor=divisor)
