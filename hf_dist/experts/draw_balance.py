"""How evenly a training has used its experts: lines for a terminal, and an SVG of layers x experts."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hf_dist.experts.load_file import ExpertLoad

__all__ = ["balance_lines", "draw_balance"]

_MOST_WIDTH, _CELL, _ROW, _TOP = 720, 24, 22, 52


def balance_lines(load: ExpertLoad) -> list[str]:
    """One line per layer: the busiest expert and rank over the mean, and how many experts got no row."""
    names = [_short(path) for path in load.layers]
    wide = max(map(len, names), default=0)
    lines = [
        f"steps {load.first_step} to {load.last_step}, experts on {load.ranks} ranks; the most rows over the mean (1 is even):",
        f"{'':<{wide}}  busiest expert  busiest rank  experts without a row",
    ]
    for name, (path, rows) in zip(names, load.layers.items(), strict=True):
        expert, rank = load.ratios(path)
        busiest = f"{expert:.2f} (expert {rows.index(max(rows))})"
        lines.append(f"{name:<{wide}}  {busiest:<14}  {rank:<12.2f}  {rows.count(0)} of {len(rows)}")
    return lines


def draw_balance(load: ExpertLoad) -> str:
    """A row of cells per layer, a cell per expert, as dark as its rows; lines between the ranks that have the experts."""
    names = [_short(path) for path in load.layers]
    experts = max(map(len, load.layers.values()))
    left = 12 + 7 * max(map(len, names))
    cell = min(_CELL, _MOST_WIDTH / experts)
    bottom = _TOP + len(names) * _ROW
    out = [
        f'<text x="6" y="18" font-weight="bold">rows of each expert over the mean of its layer, {_steps(load)}</text>'
    ]
    for i, (name, (path, rows)) in enumerate(zip(names, load.layers.items(), strict=True)):
        y = _TOP + i * _ROW
        expert, rank = load.ratios(path)
        out.append(f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        mean = max(sum(rows), 1) / len(rows)
        for e, count in enumerate(rows):
            out.append(
                f'<rect x="{left + e * cell:.1f}" y="{y}" width="{cell:.1f}" height="{_ROW - 3}" fill="{_shade(count / mean)}">'
                f"<title>expert {e}: {count} rows, {count / mean:.2f} of the mean</title></rect>"
            )
        note = f"expert {expert:.2f}, rank {rank:.2f}"
        out.append(f'<text x="{left + experts * cell + 8:.1f}" y="{y + 15}">{note}</text>')
    for rank in range(load.ranks + 1):
        x = left + rank * experts * cell / load.ranks
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}" stroke="black"/>')
        if rank < load.ranks:
            out.append(f'<text x="{x + 4:.1f}" y="{_TOP - 8}">rank {rank}</text>')
    for i, ratio in enumerate((0.0, 0.5, 1.0, 1.5, 2.0)):
        x = left + i * 70
        out.append(f'<rect x="{x}" y="{bottom + 10}" width="14" height="12" fill="{_shade(ratio)}" stroke="#888888"/>')
        out.append(f'<text x="{x + 18}" y="{bottom + 20}">{ratio:g}{" or more" if ratio == 2 else ""}</text>')
    size = f'width="{left + experts * cell + 160:.0f}" height="{bottom + 32}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(out) + "\n</svg>\n"


def _steps(load: ExpertLoad) -> str:
    return f"steps {load.first_step} to {load.last_step}"


def _short(path: str) -> str:
    """`model.layers.3.mlp.experts` -> `layers.3`: what tells layers apart."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[max(0, numbers[0] - 1) : numbers[-1] + 1]) if numbers else path


def _shade(ratio: float) -> str:
    """White for no row, blue at the mean, dark at twice the mean and above."""
    part = min(ratio, 2.0) / 2
    return "#" + "".join(f"{round(255 + (dark - 255) * part):02x}" for dark in (8, 48, 107))
