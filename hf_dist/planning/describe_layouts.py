"""Layouts as a table, with the reason why each loses to the first, and as a picture of their step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hf_dist.format_bytes import seconds_text, size_text
from hf_dist.planning.found import Found
from hf_dist.planning.hardware import Hardware
from hf_dist.planning.search import MOST_TRIED_OF_AXIS
from hf_dist.planning.step_time import PARTS
from hf_dist.sharding.wires import NOTHING_ENCODED, Wires
from hf_dist.svg import Picture

__all__ = ["draw_layouts", "layout_dict", "layout_table", "link_lines", "other_lines"]

_COLOURS = {
    "compute": "#4c78a8",
    "recomputation": "#9ecae9",
    "tp": "#f58518",
    "cp": "#ffbf79",
    "ep": "#b279a2",
    "weights": "#e45756",
    "bubble": "#bab0ac",
    "optimizer": "#54a24b",
}
_NEED, _LIMIT, _LINE = "#72b7b2", "#d62728", "#444444"
_LEFT, _WIDE, _MEMORY, _NARROW = 330, 480, 920, 260
_TOP, _BAR, _GAP = 48, 26, 8
"""Pixels of the picture: the two panels from left to right, the bars from above."""
_MOST_TICKS = 6
_MOST_REASONS = 3
_SLOW = 0.1
"""Share of the step from which fewer bytes are worth a line."""


def layout_table(found: Sequence[Found]) -> list[str]:
    """One line per layout below a header, fastest first."""
    head = (
        *("", "layout", "microbatches", "runs again", "tokens/s", "step", "exposed", "bubble"),
        *("at rest", "peak", "inside", "between", "loses by"),
    )
    rows = [head, *(_row(number, each, found[0]) for number, each in enumerate(found, start=1))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(number: int, found: Found, first: Found) -> tuple[str, ...]:
    layout, time = found.layout, found.time
    parts = f", {layout.virtual} parts a rank" if layout.virtual > 1 else ""
    return (
        str(number),
        layout.text,
        f"{layout.micro} x {layout.microbatches}{parts}",
        layout.recomputed,
        f"{found.speed:.0f}",
        seconds_text(time.seconds),
        f"{time.exposed / time.seconds:.1%}",
        f"{time.bubble:.1%}",
        size_text(found.at_rest),
        size_text(found.plan.device_need),
        size_text(time.inside),
        size_text(time.between),
        "" if found is first else reason(found, first),
    )


def other_lines(others: Mapping[str, Found | None], first: Found) -> list[str]:
    """A line for each axis that none of the best has."""
    lines = []
    for axis, found in others.items():
        if found is None:
            lines.append(f"with {axis}: none of the {MOST_TRIED_OF_AXIS} fastest fits")
        else:
            step = f"{seconds_text(found.time.seconds)}, {size_text(found.plan.device_need)}"
            lines.append(f"with {axis}: {found.layout.text}, {step}; loses by {reason(found, first)}")
    return lines


def link_lines(found: Found, wires: Wires, hardware: Hardware) -> list[str]:
    """What would send fewer bytes, if they bound the step; the search itself proposes nothing that changes numbers."""
    time = found.time  # of what shows, latency is not saved by fewer bytes
    sending = max(time.inside / hardware.inside, time.between / hardware.between)
    shown = min(time.parts["weights"], sending) / time.seconds
    if shown < _SLOW or wires != NOTHING_ENCODED:
        return []
    return [
        f"gathers and reductions that show take {shown:.0%} of the first one's step: hf_dist.wires sends them in 4 or 8 bits, "
        "which changes the numbers (`hf-dist check` says how far)"
    ]


def reason(found: Found, first: Found) -> str:
    """For example `bubble 0.41 s, sends of tp 0.12 s; saves sends of cp 0.2 s`."""
    named = {
        "tp": "sends of tp",
        "cp": "sends of cp",
        "ep": "sends of ep",
        "weights": "gathers and reductions that show",
    }
    more = found.loses(first)[:_MOST_REASONS]
    if not more:
        return "nothing: as fast"

    def text(parts: Sequence[tuple[str, float]]) -> str:
        return ", ".join(f"{named.get(name, name)} {seconds_text(seconds)}" for name, seconds in parts)

    saved = first.loses(found)[:1]
    return text(more) + (f"; saves {text(saved)}" if saved else "")


def layout_dict(found: Found, first: Found) -> dict[str, object]:
    """Plain values for programs."""
    return {
        "layout": found.layout.text,
        "values": found.layout.values,
        "tokens_per_second_and_rank": found.speed,
        "seconds": dict(found.time.parts),
        "bubble": found.time.bubble,
        "device_at_rest": found.at_rest,
        "device_peak": found.plan.device_peak,
        "device_need": found.plan.device_need,
        "sent": dict(found.time.sent),
        "sent_inside": found.time.inside,
        "sent_between": found.time.between,
        "loses_by": dict(found.loses(first)),
    }


def draw_layouts(found: Sequence[Found], device: int | None = None) -> Picture:
    """One bar per layout, as long as its step, in the colours of the step's parts; beside it the memory that it needs.

    `device`: bytes of a rank's device, drawn as a line over the memory.
    """
    shown = [part for part in PARTS if any(each.time.parts[part] > 0 for each in found)]
    bottom = _TOP + len(found) * (_BAR + _GAP)
    picture = Picture(12, _MEMORY + _NARROW + 90, bottom + 24)
    at = float(_LEFT)
    for part in shown:
        picture.box(at, 8, 10, 10, _COLOURS[part])
        picture.words(at + 14, 17, part)
        at += 40 + 7 * len(part)
    picture.words(_LEFT, 34, "time of a step")
    picture.words(_MEMORY, 34, "memory that a device needs")
    longest = max(each.time.seconds for each in found)
    most = max(*(each.plan.device_need for each in found), device or 0) / 1e9
    _axis(picture, _LEFT, _WIDE, longest, bottom, seconds_text)
    _axis(picture, _MEMORY, _NARROW, most, bottom, "{:.4g} GB".format)
    for i, each in enumerate(found):
        y, x = _TOP + i * (_BAR + _GAP), float(_LEFT)
        picture.words(_LEFT - 8, y + 17, each.layout.text, anchor="end")
        for part in shown:
            seconds = each.time.parts[part]
            length = _WIDE * seconds / longest
            if length > 0.2:
                picture.box(x, y, length, _BAR, _COLOURS[part], title=f"{part} {seconds_text(seconds)}")
            x += length
        picture.words(x + 6, y + 17, seconds_text(each.time.seconds))
        need = each.plan.device_need
        picture.box(_MEMORY, y, _NARROW * need / 1e9 / most, _BAR, _NEED, title=size_text(need))
        picture.words(_MEMORY + _NARROW * need / 1e9 / most + 6, y + 17, size_text(need))
    if device is not None:
        x = _MEMORY + _NARROW * device / 1e9 / most
        picture.box(x - 1, _TOP - 6, 2, bottom - _TOP + 6, _LIMIT, title=f"the device: {size_text(device)}")
        picture.words(x, 18, f"the device: {size_text(device)}", anchor="middle")
    return picture


def _axis(
    picture: Picture, left: float, width: float, most: float, bottom: float, text: Callable[[float], str]
) -> None:
    """A line below the bars, with ticks at round numbers up to `most`; `text` is a tick's label."""
    step = next(
        n * 10.0**power for power in range(-9, 12) for n in (1, 2, 5) if most / (n * 10.0**power) <= _MOST_TICKS
    )
    picture.box(left, bottom, width, 1, _LINE)
    for i in range(int(most / step * (1 + 1e-9)) + 1):
        x = left + width * i * step / most
        picture.box(x, bottom, 1, 5, _LINE)
        picture.words(x, bottom + 18, text(i * step) if i else "0", anchor="middle")
