"""Positions of ranks: the axes of a job, their sizes, and the lines of ranks along every axis and view.

    world = pp x dp_replicate x dp_shard x cp x tp        ranks are counted with tp innermost (neighbours), pp outermost
    shard = dp_shard x cp = edp x ep                      experts fold into the ranks that ZeRO shards over
    cp = cp_replicate x cp_shard, shard = cp_shard        where the ranks of a sequence are more than those of a shard

Pure arithmetic: no process group, no torch. `groups.py` makes the groups. `Axes` answers which ranks read which rows, which
ranks hold which layers, and how many ranks an axis has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_dist.errors import ConfigError, Problem

AXES: Mapping[str, tuple[str, ...]] = {
    "pp": ("world", "model", "batch", "replica"),  # pipeline stages
    "dp_replicate": ("world", "dp", "data"),  # copies of what is sharded (HSDP)
    "cp_replicate": ("world", "dp", "cp", "batch", "replica"),  # parts of a sequence, on copies of what is sharded
    "dp_shard": ("world", "dp", "data", "shard", "replica"),  # ZeRO's shards
    "cp_shard": ("world", "dp", "cp", "shard", "batch", "replica"),  # parts of a sequence, on shards
    "tp": ("world", "model", "batch", "replica"),  # parts of a matrix
}
"""Axis -> the views it belongs to; outermost first. The views:

    world   all ranks
    dp      ranks that hold the same part of the model: losses, gradients and norms are combined over them
    data    ranks that read different rows
    cp      ranks that compute on parts of the same sequences
    shard   ranks that ZeRO shards dense weights over
    model   ranks that hold one copy of the model between them
    batch   ranks that read the same rows
    replica ranks that train together between two meetings of replicas (`parallel/local_sgd/`)

Of `cp_replicate` and `dp_shard` one is 1: shards either lie inside of a sequence, or reach over several whole ones.
"""
EXPERTS: tuple[str, ...] = ("edp", "ep")
"""How the ranks of `shard` divide the experts of a layer: `ep` neighbours hold different experts, `edp` ranks shard each."""
PATHS: Mapping[str, str] = {
    "pp": "pipeline.stages",
    "shard": "zero_optimization.mics_shard_size",
    "cp": "sequence_parallel_size",
    "tp": "tensor_parallel.autotp_size",
    "ep": "expert_parallel.autoep_size",
}
"""Axis -> the config key (or argument) that sets its size, for messages."""

NEIGHBOURS = "neighbours"
"""Adjacent ranks of `shard` that share a second copy of the weights."""
HOPS = ("machine on shard", "machines on shard")
"""Adjacent ranks of `shard` that add up gradients among themselves first, and the ranks of one place in every such block."""
RANKS_PER_MACHINE = 8
"""Assumed upper bound in plans for jobs whose machines are not described."""


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes, and each rank's coordinates and lines. `axis` below is the name of an axis or a view."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks along each of `AXES` and along `ep`; an axis that is not named has 1."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Adjacent ranks of `shard` that have an axis of their own: `NEIGHBOURS`, or the first of `HOPS` -> their number."""

    def __post_init__(self) -> None:
        assert all(name in AXES or name == "ep" for name in self.sizes), f"no axis, or a view: {self.sizes}"

    @classmethod
    def of(
        cls,
        world: int,
        *,
        pp: int = 1,
        shard: int | None = None,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        paths: Mapping[str, str] = PATHS,
    ) -> Axes:
        """The axes of `world` ranks; `shard`: ranks that states are sharded over (None: all that hold the same layers).

        The remaining factor becomes `dp_replicate`. Raises the same `ConfigError` on every rank for sizes that do not divide.
        """
        wrong = [(name, size) for name, size in (("pp", pp), ("cp", cp), ("tp", tp), ("ep", ep)) if size < 1]
        if wrong:
            raise ConfigError([Problem(paths[name], str(size), "is not at least 1", "") for name, size in wrong])
        left, among = world, f"{world} processes of this job"
        for name, size in (("pp", pp), ("tp", tp), ("cp", cp)):
            if left % size:
                remedy = f"Start a multiple of {world // left * size} processes, or use a divisor of {left}."
                raise ConfigError(Problem(paths[name], str(size), f"does not divide the {among}", remedy))
            left //= size
            if size > 1:
                among = f"{left} that remain of {world} processes for each of the {world // left} parts of the model"
        ranks = left * cp
        shard = ranks if shard is None else shard
        fits = f" that is a multiple or a divisor of {paths['cp']} ({cp})" if cp > 1 else ""
        if shard < 1 or ranks % shard or (shard % cp and cp % shard):
            expected = f"is not a divisor of the {ranks} ranks that hold the same layers{fits}"
            remedy = f"Use a divisor of {ranks}{fits}, or remove the key to shard over all of them."
            raise ConfigError(Problem(paths["shard"], str(shard), expected, remedy))
        if shard % ep:
            expected = f"does not divide the {shard} ranks among which states are sharded"
            raise ConfigError(Problem(paths["ep"], str(ep), expected, f"Use a divisor of {shard}."))
        both = math.gcd(shard, cp)
        parts = {"cp_replicate": cp // both, "dp_shard": shard // both, "cp_shard": both}
        return cls({"pp": pp, "dp_replicate": ranks // max(shard, cp), **parts, "tp": tp, "ep": ep})

    def size(self, axis: str) -> int:
        """Number of ranks along an axis or in a view."""
        if axis in (NEIGHBOURS, *HOPS):
            near = self.blocks.get(HOPS[0] if axis == HOPS[1] else axis, 1)
            return self.size("shard") // near if axis == HOPS[1] else near
        if axis == "edp":
            return self.size("shard") // self.size("ep")
        if axis in AXES or axis == "ep":
            return self.sizes.get(axis, 1)
        return math.prod(self.size(part) for part in self._parts(axis))

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.size("world")

    def shards_here(self, here: int) -> int:
        """How many coordinates of `shard` a machine of `here` ranks covers: each takes `tp` ranks."""
        return max(1, here // self.size("tp"))

    def coordinate(self, axis: str, rank: int) -> int:
        """The coordinate of a rank on an axis or in a view, 0 .. size - 1."""
        found = 0
        parts = self._parts(axis)
        for part, at in self._position(axis, rank):
            if part in parts:
                found = found * self.size(part) + at
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates on `AXES`; an axis that is not named counts as 0."""
        found = 0
        for part in AXES:
            found = found * self.size(part) + coordinates.get(part, 0)
        return found

    def lines(self, axis: str) -> list[list[int]]:
        """All lines along an axis or view, in the order of their first ranks. Each rank is in exactly one.

        A line lists its ranks by coordinate. Ranks of one line differ only in their coordinate on `axis`.
        """
        if axis in (NEIGHBOURS, *HOPS):
            return [part for line in self.lines("shard") for part in self._in_blocks(axis, line)]
        lines: dict[Sequence[int], list[int]] = {}
        parts = self._parts(axis)
        for rank in range(self.world):
            elsewhere = tuple(at for part, at in self._position(axis, rank) if part not in parts)
            lines.setdefault(elsewhere, []).append(rank)
        return list(lines.values())

    def line(self, axis: str, rank: int) -> list[int]:
        """The line that contains a rank, computed without visiting all ranks."""
        if axis in (NEIGHBOURS, *HOPS):
            return next(part for part in self._in_blocks(axis, self.line("shard", rank)) if rank in part)
        parts, found = self._parts(axis), [0]
        for part, at in self._position(axis, rank):
            size = self.size(part)
            places = range(size) if part in parts else (at,)
            found = [before * size + place for before in found for place in places]
        return found

    def _in_blocks(self, axis: str, line: Sequence[int]) -> list[list[int]]:
        """The lines along an axis of `blocks` that `line`, one of `shard`, is divided into."""
        size = self.size(HOPS[0] if axis == HOPS[1] else axis)
        if axis == HOPS[1]:
            return [list(line[place::size]) for place in range(size)]
        return [list(line[start : start + size]) for start in range(0, len(line), size)]

    def adjacent(self, along: str, machines: Sequence[object]) -> int:
        """How many adjacent ranks of a line share a machine, if that is the same number in all of them; else 0.

        `machines`: that of every rank; empty if unknown."""
        if not machines:
            return 0
        lines = self.lines(along)
        runs = {len(list(run)) for line in lines for _, run in itertools.groupby(line, key=lambda rank: machines[rank])}
        return runs.pop() if len(runs) == 1 else 0

    def describe(self) -> str:
        """Text such as `8 ranks = pp 2 x dp_replicate 1 x dp_shard 4`. Axes of one rank are left out, except the data axes."""
        names = ["cp" if axis == "cp_shard" else axis for axis in AXES if axis != "cp_replicate"]
        sizes = " x ".join(f"{n} {self.size(n)}" for n in names if self.size(n) > 1 or "data" in AXES.get(n, ()))
        folded = {"cp_replicate": ("cp_replicate", "cp_shard"), "ep": EXPERTS}
        inside = [pair for axis, pair in folded.items() if self.size(axis) > 1]
        within = "".join(f" ({a} {self.size(a)} x {b} {self.size(b)})" for a, b in inside)
        return f"{self.world} rank{'s' if self.world > 1 else ''} = {sizes}{within}"

    def _parts(self, name: str) -> list[str]:
        """The axes that an axis or a view consists of."""
        parts = [axis for axis, views in AXES.items() if name == axis or name in views]
        if not parts and name not in EXPERTS:
            known = dict.fromkeys([*AXES, *EXPERTS, *(view for views in AXES.values() for view in views)])
            raise KeyError(f"no axis or view {name!r}; there are {', '.join(known)}")
        return parts or [name]

    def _position(self, name: str, rank: int) -> list[tuple[str, int]]:
        """(axis, coordinate) pairs of a rank, outermost first, in the factorisation that contains `name`."""
        factors = list(AXES)
        if name in EXPERTS:
            inside = self._parts("shard")
            first = factors.index(inside[0])
            factors[first : first + len(inside)] = EXPERTS
        position = []
        for part in reversed(factors):
            rank, at = divmod(rank, self.size(part))
            position.append((part, at))
        return position[::-1]
