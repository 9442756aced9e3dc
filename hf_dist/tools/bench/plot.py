"""The figure: speed, memory, bytes sent, and a split of the time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dist.svg import headless_pyplot
from hf_dist.tools.bench.rounds import Row
from hf_dist.tools.bench.work import Work

__all__ = ["draw"]

_COLORS = {
    "data": "#bbbbbb",
    "forward": "#4477aa",
    "backward": "#66ccee",
    "optimizer": "#228833",
    "pipeline": "#aa3377",
    "other": "#ccbb44",
}


def draw(rows: Sequence[Row], work: Work, title: str, files: Sequence[Path]) -> None:
    """Write each of `files`, .png or .svg. Raises `NoMatplotlibError`."""
    pyplot = headless_pyplot()
    good = [row for row in rows if not row.error][::-1]  # drawn from below
    names = [row.name if row.agrees else f"{row.name} (losses differ)" for row in good]
    figure, panels = pyplot.subplots(2, 2, figsize=(13, 2.5 + 0.9 * len(good)), layout="constrained")
    speed, memory, sent, split = panels.flat
    middles = [row.speed[1] for row in good]
    spread = [[row.speed[1] - row.speed[0] for row in good], [row.speed[2] - row.speed[1] for row in good]]
    bars = speed.barh(names, middles, xerr=spread, color="#4477aa", ecolor="black", capsize=3)
    speed.bar_label(bars, [f"{value:,.0f}" for value in middles], label_type="center", color="white")
    speed.set_title(f"{work.unit} per second (median, quartiles)")
    _bars(memory, names, [row.peak_nbytes / 1e9 for row in good], "peak memory of a rank, GB")
    counted = [None if row.sent_nbytes is None else row.sent_nbytes / 1e6 for row in good]
    _bars(sent, names, counted, "sent per rank and step, MB")
    _split(split, names, good)
    figure.suptitle(title)
    for file in files:
        figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _bars(panel: Any, names: Sequence[str], values: Sequence[float | None], title: str) -> None:
    bars = panel.barh(names, [value or 0.0 for value in values], color="#66ccee")
    panel.bar_label(bars, ["not counted" if value is None else f"{value:.3g}" for value in values], padding=3)
    panel.margins(x=0.15)
    panel.set_title(title)


def _split(panel: Any, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Bars of the phases next to each other, with the waiting part as a thin bar below."""
    left = [0.0] * len(rows)
    for phase, color in _COLORS.items():
        if phase == "other":
            values = [max(0.0, row.step_seconds - sum(row.phases.values())) for row in rows]
        else:
            values = [row.phases.get(phase, 0.0) for row in rows]
        panel.barh(names, values, left=left, color=color, label=phase, height=0.5)
        left = [a + b for a, b in zip(left, values, strict=True)]
    waits = [row.waiting_seconds or 0.0 for row in rows]
    places = [index - 0.34 for index in range(len(rows))]
    panel.barh(places, waits, color="#ee6677", label="of it waiting", height=0.14)
    panel.set_title("seconds of a step")
    panel.legend(fontsize="small", ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
