"""Shows which ranks hold what and which links carry which bytes, as log lines and as a picture of ranks and axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_dist.dist.axes import Axes
from hf_dist.format_bytes import size_text
from hf_dist.planning.comm_volume import Traffic
from hf_dist.planning.hardware import Link
from hf_dist.svg import Picture

__all__ = ["draw_mesh", "link_on", "mesh_lines"]

HOLDS: Mapping[str, str] = {
    "pp": "different layers",
    "dp_replicate": "copies",
    "cp_replicate": "copies, inside of a sequence",
    "dp_shard": "ZeRO's shards",
    "cp": "parts of a sequence",
    "tp": "parts of a matrix",
    "edp": "shards of the same experts",
    "ep": "different experts",
}
"""What the ranks along an axis hold."""
_MOST_LINES, _MOST_RANKS = 4, 8
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6")


def link_on(axes: Axes, axis: str, machines: Sequence[int]) -> Link:
    """How the ranks of the widest line of an axis or view are connected. `machines`: the machine of every rank."""
    lines = axes.lines(axis)
    here = [min(sum(machines[r] == m for r in line) for m in {machines[r] for r in line}) for line in lines]
    return Link(axes.size(axis), min(here))


def mesh_lines(axes: Axes, machines: Sequence[int], traffic: Traffic | None = None) -> list[str]:
    """One line for each axis with more than one rank: what the ranks hold, their numbers, and where their bytes go."""
    shown = [axis for axis in HOLDS if axes.size(axis) > 1 and (axis != "edp" or axes.size("ep") > 1)]
    rows = [
        (f"{axis} {axes.size(axis)}", HOLDS[axis], _ranks(axes.lines(axis)), _where(axes, axis, machines))
        for axis in shown
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + ([_bytes(axes, axis, own, machines) for axis, own in _sums(traffic).items()] if traffic else [])


def _sums(traffic: Traffic) -> dict[str, int]:
    sums = {axis: sum(n for _, n in own.values()) for axis, own in traffic.items()}
    return {axis: n for axis, n in sums.items() if n}


def _ranks(lines: Sequence[Sequence[int]]) -> str:
    """For example `{0 1} {2 3} {4 5} {6 7} ... of 32`."""
    named = [" ".join(map(str, line[:_MOST_RANKS])) + (" ..." if len(line) > _MOST_RANKS else "") for line in lines]
    more = f" ... of {len(named)}" if len(named) > _MOST_LINES else ""
    return " ".join(f"{{{ranks}}}" for ranks in named[:_MOST_LINES]) + more


def _where(axes: Axes, axis: str, machines: Sequence[int]) -> str:
    link = link_on(axes, axis, machines)
    if link.here == link.ranks:
        return "inside machines" if len(set(machines)) > 1 else ""
    return "between machines" if link.here == 1 else f"{link.here} of them on a machine"


def _bytes(axes: Axes, axis: str, nbytes: int, machines: Sequence[int]) -> str:
    inside, between = link_on(axes, axis, machines).split(nbytes, pairwise=axis in ("ep", "cp"))
    parts = [
        f"{size_text(nbytes)} {where}"
        for nbytes, where in ((inside, "inside a machine"), (between, "between machines"))
        if nbytes
    ]
    return f"sent along {axis}, per rank and step: {', '.join(parts)}"


def draw_mesh(axes: Axes, machines: Sequence[int], traffic: Traffic | None = None) -> Picture:
    """A row of ranks for each machine, their positions on every axis, and the bytes that a rank sends."""
    shown = [axis for axis in HOLDS if axes.size(axis) > 1 and axis != "edp"]
    left, line = 90, 14
    cell = max(64, 8 + 7 * max((len(f"{axis} {axes.size(axis)}") for axis in shown), default=0))
    height = line * (len(shown) + 1) + 8
    picture, column = Picture(), dict.fromkeys(machines, 0)
    order = {machine: row for row, machine in enumerate(dict.fromkeys(machines))}
    for rank in range(axes.world):
        machine = machines[rank]
        x, y = left + column[machine] * (cell + 4), 10 + order[machine] * (height + 14)
        column[machine] += 1
        colour = _COLOURS[axes.coordinate("pp", rank) % len(_COLOURS)]
        picture.box(x, y, cell, height, colour, opacity=0.25, edge=colour)
        picture.words(x + 4, y + 13, str(rank), bold=True)
        for i, axis in enumerate(shown, start=1):
            picture.words(x + 4, y + 13 + i * line, f"{axis} {axes.coordinate(axis, rank)}")
    for machine, row in order.items():
        picture.words(6, 10 + row * (height + 14) + 13, f"machine {machine}")
    top = 10 + len(order) * (height + 14) + 10
    lines = [axes.describe(), *mesh_lines(axes, machines, traffic)]
    for i, text in enumerate(lines):
        picture.words(6, top + i * 16, text, mono=True)
    picture.width = max(left + max(column.values()) * (cell + 4) + 10, 8 * max(map(len, lines)))
    picture.height = top + len(lines) * 16 + 6
    return picture
