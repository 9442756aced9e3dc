"""Where one flat group is sharded, and over which ranks its gradient is combined after that: a row for each kind of weights.

    weights                          sharded over    then, once per window
    dense                            shard           mean over dp_replicate (HSDP)
    held by several pipeline stages  shard           the same, then the sum over their holders
    experts, cut along ep            edp             as dense; beside ranks that cut others the sum over tp
    whole between ranks that cut     shard           the same, then over tp the mean where each has the whole gradient,
    others (norms)                                   the sum where each has a part of it

A gradient is reduced to its shards by the mean over the group's shard axis in every reduction; what follows in the row happens
when the gradient of the window is there. An axis of one rank does nothing and is left out. Experts have already added up what
the tokens of all ranks of `ep` ask of them, so their mean over `edp` is divided by `ep` to be one over `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hf_dist.mesh import MeshAxis, ParallelMesh

Operation = Literal["mean", "sum"]

DENSE: tuple[tuple[str, Operation], ...] = (("dp_replicate", "mean"),)
"""Axes of the mesh for the weights of every layer that is whole on its ranks."""


@dataclass(frozen=True)
class Cut:
    """What it means for a group that its parameters are cut along an axis, whose ranks hold the other slices."""

    shard: str
    """The axis that each slice is sharded over."""
    whole: str
    """The view whose ranks hold all slices between them, each of its shards once."""
    added_up: bool
    """Whether a slice's gradient holds what every rank of the axis asks of it."""


CUTS: Mapping[str, Cut] = {
    "ep": Cut("edp", whole="shard", added_up=True),
    "tp": Cut("shard", whole="shard", added_up=False),  # of `whole` nobody asks where `model` has other ranks
}
"""By the axis."""


@dataclass(frozen=True, eq=False)
class Combination:
    """One more axis over which the gradient of a window is combined."""

    axis: MeshAxis
    operation: Operation
    at_end: bool = False
    """Whether it waits for the end of the window, where all groups are combined at once; else it starts as soon as what comes
    before is complete. The ranks of other pipeline stages issue other collectives until then."""
    between_stages: bool = False
    """Whether it is over pipeline stages: which parameters had a gradient is then known only by all of them."""


@dataclass(frozen=True, eq=False)
class GroupAxes:
    """The axes of one flat group."""

    shard: MeshAxis
    """Weights, gradients and states are sharded over it, as their placement says."""
    then: tuple[Combination, ...] = ()
    """One after the other, each with more than one rank; those `at_end` come last."""
    parts: MeshAxis | None = None
    """Whose ranks hold the other slices of the parameters; None where they are whole."""
    whole: MeshAxis | None = None
    """Whose ranks hold all slices of the parameters and their shards between them; None where that is `shard`."""
    divisor: int = 1
    """Of the mean over `shard`."""
    second: MeshAxis | None = None
    """Neighbours on `shard` that keep a second copy of the weights between them; None where there is none."""

    @property
    def owns(self) -> bool:
        """Whether this rank answers for its shard, in norms and files: the first along every axis that holds copies."""
        return all(row.axis.rank == 0 for row in self.then)

    @property
    def is_first_holder(self) -> bool:
        """Whether no earlier pipeline stage holds the same weights."""
        return all(row.axis.rank == 0 for row in self.then if row.between_stages)


def held_between_stages(holders: MeshAxis) -> Combination:
    """The row of weights that several pipeline stages hold."""
    return Combination(holders, "sum", at_end=True, between_stages=True)


def axes_by_name(
    mesh: ParallelMesh,
    copies: Mapping[str, Sequence[Combination]] | None = None,
    cuts: Mapping[str, str] | None = None,
    second: MeshAxis | None = None,
) -> Callable[[str], GroupAxes]:
    """The axes of every parameter, by its name: one object for those that may share a group.

    `copies`: parameters that are on ranks which hold other weights beside them, and how their gradients are combined; `cuts`:
    those that are cut, and along which axis; `second`: ranks that keep a second copy of what is sharded over `shard`.
    """
    copies, cuts = copies or {}, cuts or {}
    dense = _row(mesh, second, ())
    rows: dict[object, GroupAxes] = {}
    own: dict[str, GroupAxes] = {}
    for name in {**copies, **cuts}:
        more, along = copies.get(name, ()), cuts.get(name, "")
        key = (along, *((id(c.axis), c.operation) for c in more))
        if key not in rows:
            rows[key] = _cut_row(mesh, second, along, more) if along else _row(mesh, second, more)
        own[name] = rows[key]
    return lambda name: own.get(name, dense)


def _row(mesh: ParallelMesh, second: MeshAxis | None, more: Sequence[Combination]) -> GroupAxes:
    then = [*(Combination(mesh.views[name], operation) for name, operation in DENSE), *more]
    return GroupAxes(mesh.shard, tuple(c for c in then if c.axis.size > 1), second=second)


def _cut_row(mesh: ParallelMesh, second: MeshAxis | None, along: str, more: Sequence[Combination]) -> GroupAxes:
    cut, parts = CUTS[along], mesh.views[along]
    divisor = parts.size if cut.added_up else 1
    row = _row(mesh, second if cut.shard == "shard" else None, more)
    return replace(row, shard=mesh.views[cut.shard], parts=parts, whole=mesh.views[cut.whole], divisor=divisor)
