"""`hf-dist profile`: the phases of a profile that `hf_dist.profile` has written, added up."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dist.errors import HfDistError

__all__ = ["profile"]

_MICRO = 1e-6
Files = Annotated[list[Path], typer.Argument(help="Traces: rank0_steps10-12.json.gz, ...", show_default=False)]


def profile(files: Files) -> None:
    """Add up the seconds of the host by phase in traces of training steps, and say how to look at the traces.

    The seconds of a phase include all that happens in it. A file that is no such trace is an error.
    """
    from rich.console import Console
    from rich.table import Table

    from hf_dist.dist.ranges import PREFIX

    console = Console()
    for file in files:
        seconds: dict[str, list[float]] = defaultdict(list)
        for event in _events(file):
            if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(PREFIX):
                seconds[event["name"].removeprefix(PREFIX)].append(event["dur"] * _MICRO)
        table = Table("phase", title=str(file))
        for title in ("times", "seconds", "ms each"):
            table.add_column(title, justify="right")
        for name, each in sorted(seconds.items(), key=lambda item: -sum(item[1])):
            table.add_row(name, str(len(each)), f"{sum(each):.4f}", f"{1e3 * sum(each) / len(each):.3f}")
        console.print(table)
    console.print("In a picture: open the file at https://ui.perfetto.dev")
    console.print("CUDA's memory (.pickle): at https://pytorch.org/memory_viz")


def _events(file: Path) -> list[dict[str, Any]]:
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfDistError(f"{file}: is not a trace of torch's profiler ({type(error).__name__}: {error})") from error
    return events
