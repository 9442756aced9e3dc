"""Where one flat group is sharded, and over which ranks its gradient is combined after that: a row for each kind of weights.

    weights                          sharded over    then, once per window
    dense                            shard           mean over dp_replicate (HSDP)
    held by several pipeline stages  shard           the same, then the sum over their holders
    experts, cut along ep            edp             as dense

A gradient is reduced to its shards by the mean over the group's shard axis in every reduction; what follows in the row happens
when the gradient of the window is there. An axis of one rank does nothing and is left out. Experts have already added up what
the tokens of all ranks of `ep` ask of them, so their mean over `edp` is divided by `ep` to be one over `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


CUTS: Mapping[str, Cut] = {"ep": Cut("edp", whole="shard", added_up=True)}
"""By the axis."""


@dataclass(frozen=True, eq=False)
class Combination:
    """One more axis over which the gradient of a window is combined."""

    axis: MeshAxis
    operation: Operation
    at_end: bool = False
    """Whether it waits for the end of the window: the ranks of other pipeline stages issue other collectives until then, and
    which parameters had a gradient is known only by all of them. Else it starts as soon as what comes before is complete."""


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
        return all(row.axis.rank == 0 for row in self.then if row.at_end)


def axes_by_name(
    mesh: ParallelMesh,
    holders: Mapping[str, MeshAxis] | None = None,
    cuts: Mapping[str, str] | None = None,
    second: MeshAxis | None = None,
) -> Callable[[str], GroupAxes]:
    """The axes of every parameter, by its name: one object for those that may share a group.

    `holders`: parameters that other pipeline stages hold, too, and over which ranks; `cuts`: those that are cut, and along
    which axis; `second`: ranks that keep a second copy of what is whole.
    """
    dense = _row(mesh, second)
    held = {id(axis): _row(mesh, second, axis) for axis in (holders or {}).values()}
    own = {name: held[id(axis)] for name, axis in (holders or {}).items()}
    cut = {along: _cut_row(mesh, along) for along in set((cuts or {}).values())}
    own.update({name: cut[along] for name, along in (cuts or {}).items()})
    return lambda name: own.get(name, dense)


def _row(mesh: ParallelMesh, second: MeshAxis | None, holders: MeshAxis | None = None) -> GroupAxes:
    then = [Combination(mesh.views[name], operation) for name, operation in DENSE]
    if holders is not None:
        then.append(Combination(holders, "sum", at_end=True))
    return GroupAxes(mesh.shard, tuple(c for c in then if c.axis.size > 1), second=second)


def _cut_row(mesh: ParallelMesh, along: str) -> GroupAxes:
    cut, parts = CUTS[along], mesh.views[along]
    divisor = parts.size if cut.added_up else 1
    row = _row(mesh, None)
    return replace(row, shard=mesh.views[cut.shard], parts=parts, whole=mesh.views[cut.whole], divisor=divisor)
