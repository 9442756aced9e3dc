"""Rows as tables for the terminal, and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from hf_dist.format_bytes import size_text
from hf_dist.tools.bench.meter import PHASES
from hf_dist.tools.bench.prepare import Prepared
from hf_dist.tools.bench.rounds import Row, Run
from hf_dist.tools.bench.work import Work

__all__ = ["as_json", "print_tables"]


def print_tables(prepared: Prepared, rows: Sequence[Row], console: Console) -> None:
    """Print the figures, the split of the time, and remarks on the numbers."""
    work = prepared.work
    first = Table(box=None, pad_edge=False)
    for name in (
        "",
        f"{work.unit}/s",
        "quartiles",
        "ratio",
        "peak memory",
        "sent per step",
        "first step",
        "last loss",
        "",
    ):
        first.add_column(name, no_wrap=True, justify="left" if name == "" else "right")
    second = Table(box=None, pad_edge=False)
    for name in ("time of a step", "seconds", *PHASES, "of it waiting"):
        second.add_column(name, no_wrap=True, justify="left" if name == "time of a step" else "right")
    for row in rows:
        if row.error:
            first.add_row(row.name, "failed")
            continue
        low, middle, high = row.speed
        first.add_row(
            *(row.name, f"{middle:,.0f}", f"{low:,.0f} - {high:,.0f}", f"{row.ratio:.2f}", size_text(row.peak_nbytes)),
            *(
                "not counted" if row.sent_nbytes is None else size_text(row.sent_nbytes),
                f"{row.first_step_seconds:.1f} s",
            ),
            *(f"{row.losses[-1]:.5f}", "" if row.agrees else "DIFFERS"),
        )
        parts = [f"{row.phases.get(phase, 0.0) / row.step_seconds:.0%}" for phase in PHASES]
        waiting = "not measured" if row.waiting_seconds is None else f"{row.waiting_seconds / row.step_seconds:.0%}"
        second.add_row(row.name, f"{row.step_seconds:.3f}", *parts, waiting)
    console.print(first)
    console.print()
    console.print(second)
    for line in _remarks(rows, work):
        console.print(line, markup=False, soft_wrap=True)


def _remarks(rows: Sequence[Row], work: Work) -> list[str]:
    lines = [""]
    for row in rows:
        if row.error:
            lines.append(f"{row.name} failed: {row.error.splitlines()[-1]}")
    good = [row for row in rows if not row.error]
    for row in good:
        if not row.agrees:
            lines.append(
                f"{row.name}: its losses DIFFER from those of {good[0].name} by up to {row.difference:.1e} (relative), more "
                f"than {work.dtype} explains: its speed is that of another computation"
            )
    if len(good) > 1 and all(row.agrees for row in good):
        worst = max(row.difference or 0.0 for row in good)
        lines.append(f"losses agree: all {len(good[0].losses)} steps of all rows within {worst:.1e} of {good[0].name}")
    return lines


def as_json(prepared: Prepared, rows: Sequence[Row], runs: Sequence[Run]) -> dict[str, object]:
    """Everything: work, machine, rows, and each rank's measurements in every round."""
    import transformers

    work = asdict(prepared.work)
    del work["folder"]
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if prepared.work.device == "cuda" else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    contenders = [{**asdict(each), "python": bool(each.python)} for each in prepared.contenders]
    result: dict[str, object] = {"work": work, "machine": machine, "contenders": contenders}
    return result | {
        "rows": [asdict(row) for row in rows],
        "skipped": prepared.skipped,
        "runs": [asdict(each) for each in runs],
    }
