"""The roles of a start as a picture: a band of ranks for each, and which rank of a role each rank of the trainer asks."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dist.dist.axes import Axes
from hf_dist.planning.role_parts import Part
from hf_dist.remote.routes import server_of
from hf_dist.svg import Picture

__all__ = ["draw_roles"]

_COLOURS = ("#4878a8", "#c8783c", "#5a9a5a", "#9467a8")
_LEFT, _CELL, _LINE = 130, 92, 15


def draw_roles(roles: Sequence[tuple[Part, Axes]]) -> Picture:
    """`roles`: the trainer first; each with its axes. Ranks are numbered as in the start."""
    picture, y = Picture(), 10
    trainer = roles[0][1]
    for number, (part, axes) in enumerate(roles):
        shown = [axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if axes.size(axis) > 1]
        asked = [each for each in roles[1:] if not each[0].averages] if number == 0 and part.model is None else []
        height = _LINE * (1 + len(shown) + len(asked)) + 8
        colour = _COLOURS[number % len(_COLOURS)]
        picture.words(6, y + 13, part.name, bold=True)
        picture.words(
            6,
            y + 13 + _LINE,
            "runs the script"
            if part.model is None
            else "averages replicas"
            if part.averages
            else "runs functions"
            if not part.model
            else "trains"
            if part.trains
            else "is frozen",
        )
        for rank in range(part.ranks):
            x = _LEFT + rank * (_CELL + 4)
            picture.box(x, y, _CELL, height, colour, opacity=0.25, edge=colour)
            lines = [f"{axis} {axes.coordinate(axis, rank)}" for axis in shown]
            for other, its in asked:
                server = server_of(trainer.coordinate("data", rank), trainer.size("data"), its.size("data"))
                first = next(r for r in range(its.world) if its.coordinate("data", r) == server)
                lines.append(f"asks {other.first + first}")
            picture.words(x + 4, y + 13, str(part.first + rank), bold=True)
            for i, text in enumerate(lines, start=1):
                picture.words(x + 4, y + 13 + i * _LINE, text)
        y += height + 12
    for text in _NOTES:
        picture.words(6, y + 8, text)
        y += 16
    most = max(part.ranks for part, _ in roles)
    picture.width, picture.height = max(_LEFT + most * (_CELL + 4) + 10, 8 * max(map(len, _NOTES))), y + 6
    return picture


_NOTES = (
    "asks N: sends its rows to rank N, whose role computes them together;",
    "back come logits, hidden states, log-probabilities or gradients.",
)
