"""Where one flat group is sharded, and over which ranks its gradient is combined after that: a row for each kind of weights.

    weights                          sharded over    then, once per window
    dense                            shard           mean over dp_replicate (HSDP)
    held by several pipeline stages  shard           the same, then the sum over their holders

A gradient is reduced to its shards by the mean over `shard` in every reduction; what follows in the row happens when the
gradient of the window is there. An axis of one rank does nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hf_dist.mesh import MeshAxis, ParallelMesh

Operation = Literal["mean", "sum"]

DENSE: tuple[tuple[str, Operation], ...] = (("dp_replicate", "mean"),)
"""Axes of the mesh for the weights of every layer that is whole on its ranks."""


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

    @property
    def owns(self) -> bool:
        """Whether this rank answers for its shard, in norms and files: the first along every axis that holds copies."""
        return all(row.axis.rank == 0 for row in self.then)

    @property
    def is_first_holder(self) -> bool:
        """Whether no earlier pipeline stage holds the same weights."""
        return all(row.axis.rank == 0 for row in self.then if row.at_end)


def axes_by_name(mesh: ParallelMesh, holders: Mapping[str, MeshAxis] | None = None) -> Callable[[str], GroupAxes]:
    """The axes of every parameter, by its name: one object for those that may share a group.

    `holders`: parameters that other pipeline stages hold, too, and over which ranks.
    """
    dense = _row(mesh)
    rows = {id(axis): _row(mesh, axis) for axis in (holders or {}).values()}
    own = {name: rows[id(axis)] for name, axis in (holders or {}).items()}
    return lambda name: own.get(name, dense)


def _row(mesh: ParallelMesh, holders: MeshAxis | None = None) -> GroupAxes:
    then = [Combination(mesh.views[name], operation) for name, operation in DENSE]
    if holders is not None:
        then.append(Combination(holders, "sum", at_end=True))
    return GroupAxes(mesh.shard, tuple(c for c in then if c.axis.size > 1))
