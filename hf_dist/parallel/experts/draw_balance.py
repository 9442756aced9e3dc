"""How evenly a training has used its experts: lines for a terminal, and a picture of layers x experts."""

from __future__ import annotations

import math

from hf_dist.parallel.experts.load_file import ExpertLoad
from hf_dist.svg import Picture

__all__ = ["balance_lines", "draw_balance"]

_MOST_WIDTH, _CELL, _LABEL, _ROW, _TOP = 720, 24, 64, 22, 52


def balance_lines(load: ExpertLoad) -> list[str]:
    """One line per layer: the busiest expert and rank over the mean, and how many experts got no row."""
    names = [_short(path) for path in load.layers]
    wide = max(map(len, names), default=0)
    lines = [
        f"steps {load.first_step} to {load.last_step}, experts on {load.ranks} ranks; the most rows over the mean (1 is even):",
        f"{'':<{wide}}  busiest expert    busiest rank  experts without a row",
    ]
    for name, (path, rows) in zip(names, load.layers.items(), strict=True):
        expert, rank = load.ratios(path)
        busiest = f"{expert:.2f} (expert {rows.index(max(rows))})"
        lines.append(f"{name:<{wide}}  {busiest:<16}  {rank:<12.2f}  {rows.count(0)} of {len(rows)}")
    return lines


def draw_balance(load: ExpertLoad) -> Picture:
    """A row of cells per layer, a cell per expert, as dark as its rows; lines between the ranks that hold the experts."""
    names = [_short(path) for path in load.layers]
    experts = max(map(len, load.layers.values()))
    left = 12 + 7 * max(map(len, names))
    cell = min(_MOST_WIDTH / experts, max(_CELL, _LABEL * load.ranks / experts))
    every = math.ceil(_LABEL * load.ranks / (experts * cell))  # the ranks that are named: their names need room
    bottom = _TOP + len(names) * _ROW
    picture = Picture(size=12, width=left + experts * cell + 160, height=bottom + 32)
    steps = f"steps {load.first_step} to {load.last_step}"
    picture.words(6, 18, f"rows of each expert over the mean of its layer, {steps}", bold=True)
    for i, (name, (path, rows)) in enumerate(zip(names, load.layers.items(), strict=True)):
        y = _TOP + i * _ROW
        expert, rank = load.ratios(path)
        picture.words(left - 6, y + 15, name, anchor="end")
        mean = max(sum(rows), 1) / len(rows)
        for e, count in enumerate(rows):
            title = f"expert {e}: {count} rows, {count / mean:.2f} of the mean"
            picture.box(left + e * cell, y, cell, _ROW - 3, _shade(count / mean), title=title)
        picture.words(left + experts * cell + 8, y + 15, f"expert {expert:.2f}, rank {rank:.2f}")
    for rank in range(load.ranks + 1):
        x = left + rank * experts * cell / load.ranks
        picture.box(x - 0.5, _TOP - 4, 1, bottom - _TOP + 4, "#000000")
        if rank < load.ranks and rank % every == 0:
            picture.words(x + 4, _TOP - 8, f"rank {rank}")
    for i, ratio in enumerate((0.0, 0.5, 1.0, 1.5, 2.0)):
        x = left + i * 70
        picture.box(x, bottom + 10, 14, 12, _shade(ratio), edge="#888888")
        picture.words(x + 18, bottom + 20, f"{ratio:g}{' or more' if ratio == 2 else ''}")
    return picture


def _short(path: str) -> str:
    """`model.layers.3.mlp.experts` -> `layers.3`: what tells layers apart."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[max(0, numbers[0] - 1) : numbers[-1] + 1]) if numbers else path


def _shade(ratio: float) -> str:
    """White for no row, blue at the mean, dark at twice the mean and above."""
    part = min(ratio, 2.0) / 2
    return "#" + "".join(f"{round(255 + (dark - 255) * part):02x}" for dark in (8, 48, 107))
