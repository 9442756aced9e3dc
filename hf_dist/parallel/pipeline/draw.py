"""A schedule as a picture: text for a terminal or an error message, a picture for a page. Time runs to the right."""

from __future__ import annotations

import textwrap

from hf_dist.parallel.pipeline.actions import Kind, Schedule
from hf_dist.parallel.pipeline.simulate import Costs, Simulation, Span, simulate
from hf_dist.svg import Picture

__all__ = ["draw_schedule", "draw_text"]

_COLOURS = {
    Kind.FORWARD: "#7fb2e5",
    Kind.BACKWARD: "#f2b36d",
    Kind.BACKWARD_INPUT: "#f2b36d",
    Kind.BACKWARD_WEIGHT: "#9ccf8f",
}
_LEGEND = "F forward, B backward, I backward for inputs, W backward for weights; the number is the microbatch"
_COLUMNS = "One column is the time of a forward; a backward takes two, an I or W one; dots are waiting."
_ROW, _LEFT, _UNIT = 28, 60, 26  # pixels


def draw_text(schedule: Schedule, costs: Costs | None = None, line_width: int | None = None) -> str:
    """One line per rank, one column per unit of time, dots for idle time; then bubble and microbatches in flight.

    `line_width`: characters of a line; a longer schedule goes on below, after an empty line. None for no limit. If ranks have
    several stages, the stage's number precedes the letter. Fractional costs are rounded.
    """
    result = simulate(schedule, costs)
    many = schedule.num_stages > schedule.num_ranks
    width = max((len(_label(span, many)) for rank in result.spans for span in rank), default=1)
    rows = []
    for spans in result.spans:
        cells = ["." * width] * round(result.makespan)
        for span in spans:
            for column in range(round(span.start), round(span.stop)):
                cells[column] = _label(span, many).ljust(width)
        rows.append(cells)
    names = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    left = len(names[-1])
    shown = len(rows[0]) if line_width is None else max(1, (line_width - left - len(" |")) // (width + 1))
    lines: list[str] = []
    for start in range(0, len(rows[0]), shown):
        row = (
            f"{name:<{left}} | {' '.join(cells[start : start + shown])}"
            for name, cells in zip(names, rows, strict=True)
        )
        lines += [*row, ""]
    texts = [_summary(schedule, result), _LEGEND, *([] if costs else [_COLUMNS])]
    wrapped = [text if line_width is None else textwrap.fill(text, line_width) for text in texts]
    return "\n".join([*lines, *wrapped])


def draw_schedule(schedule: Schedule, costs: Costs | None = None) -> Picture:
    """The schedule as a picture, drawn to scale."""
    result = simulate(schedule, costs)
    many = schedule.num_stages > schedule.num_ranks
    picture = Picture(11, round(_LEFT + result.makespan * _UNIT + 10), (schedule.num_ranks + 2) * _ROW)
    for rank, spans in enumerate(result.spans):
        top = rank * _ROW + 6
        picture.words(6, top + 16, f"rank {rank}")
        for span in spans:
            left, wide = _LEFT + span.start * _UNIT, (span.stop - span.start) * _UNIT
            colour = _COLOURS[span.action.kind]
            picture.box(left, top, wide, _ROW - 4, colour, edge="white", title=str(span.action))
            picture.words(left + wide / 2, top + 16, _label(span, many), anchor="middle")
    for line, text in enumerate((_summary(schedule, result), _LEGEND)):
        picture.words(6, (schedule.num_ranks + line) * _ROW + 22, text)
    return picture


def _label(span: Span, many: bool) -> str:
    action = span.action
    return str(action) if many else f"{action.kind.value}{action.microbatch}"


def _summary(schedule: Schedule, result: Simulation) -> str:
    in_flight = ", ".join(map(str, result.in_flight))
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, {schedule.num_microbatches} "
        f"microbatches. Bubble {result.bubble:.1%}. Most microbatches in flight per stage: {in_flight}"
    )
