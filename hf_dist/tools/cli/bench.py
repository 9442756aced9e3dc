"""`hf-dist bench`: how does hf_dist compare? The same training under several engines on this machine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hf_dist.errors import HfDistError
from hf_dist.tools.bench.asked import Asked
from hf_dist.tools.cli.options import signature_of
from hf_dist.tools.cli.written import to_write, write_texts, writing

__all__ = ["bench"]

_OPTIONS: dict[str, Any] = {
    "model": typer.Option(help="A model folder, or an ID of the hub."),
    "config": typer.Option(help="DeepSpeed-style JSON files: --config a.json b.json."),
    "more": typer.Argument(hidden=True),
    "engines": typer.Option(help="Comma-separated: hf_dist, fsdp2, ddp, deepspeed, hf_dist_trainer, accelerate_fsdp2."),
    "steps": typer.Option(help="Timed steps per run.", min=1),
    "rounds": typer.Option(help="Runs of each engine, interleaved.", min=1),
    "ranks": typer.Option(help="Processes; default: one per GPU, or 2 without GPUs.", min=1, show_default=False),
    "seq": typer.Option(help="Tokens per row.", min=2),
    "micro_batch": typer.Option("--micro-batch", help="Rows per rank and forward.", min=1),
    "accumulation": typer.Option(help="Microbatches per step.", min=1),
    "num_layers": typer.Option(
        "--num-layers", help="Keep this many layers, with random weights.", min=1, show_default=False
    ),
    "dtype": typer.Option(help="bf16 (with fp32 master weights) or fp32, whatever the configs say."),
    "data": typer.Option(help="synthetic, JSON lines (input_ids or text, labels), or a text file."),
    "output": typer.Option(
        help="Folder for bench.json, bench.png, bench.svg; or a .svg or .png file.",
        callback=to_write("folder or picture"),
    ),
    "deepspeed_python": typer.Option(
        "--deepspeed-python", help="A Python interpreter that has deepspeed, if this one does not.", show_default=False
    ),
}


def bench(**options: Any) -> None:
    """Run the same model, batches, precision and optimizer under several engines and configs, and compare them.

    Engines that are not installed are skipped. An engine that fails is a row with its error. Exit code 1 if no engine ran.
    """
    from hf_dist.svg import NoMatplotlibError
    from hf_dist.tools.bench.plot import draw
    from hf_dist.tools.bench.prepare import prepare
    from hf_dist.tools.bench.rounds import run_rounds, summarize
    from hf_dist.tools.bench.table import as_json, print_tables
    from hf_dist.tools.check import quiet

    asked = Asked(**{**options, "more": options["more"] or []})
    console = Console(width=max(140, Console().width), highlight=False)
    with tempfile.TemporaryDirectory(prefix="hf_dist_bench_") as folder:
        with quiet():
            prepared = prepare(asked, Path(folder))
        for line in prepared.skipped:
            console.print(line, markup=False)
        if not prepared.contenders:
            raise HfDistError("--engines: none of them is installed here")
        work = prepared.work
        shape = f"microbatches of {work.micro_batch} x {asked.seq} x {work.accumulation}, {work.ranks} ranks on {work.device}"
        title = f"{asked.model}, {work.dtype}, gradients on the wire {work.reduce_dtype}, {shape}"
        console.print(title, markup=False, soft_wrap=True)
        runs = run_rounds(prepared, asked.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    rows = summarize(work, prepared.contenders, runs)
    print_tables(prepared, rows, console)
    if hasattr(os, "getloadavg"):
        loads = [run.load for run in runs]
        print(f"load of the machine when runs began: {min(loads):.1f} to {max(loads):.1f}, {os.cpu_count()} cores")
    file, pictures = _files(asked.output)
    write_texts({file: json.dumps(as_json(prepared, rows, runs), indent=1) + "\n"})
    files = [file]
    if any(not row.error for row in rows):
        try:
            with writing(file.parent):
                draw(rows, work, title, pictures)
            files += pictures
        except NoMatplotlibError as error:
            print(error)
    print(f"wrote {', '.join(str(each) for each in files)}")
    if all(row.error for row in rows):
        sys.exit(1)


def _files(output: Path) -> tuple[Path, list[Path]]:
    """(figures, pictures): in the folder `output`, or beside the picture `output`."""
    if output.suffix in (".svg", ".png"):
        return output.with_suffix(".json"), [output]
    return output / "bench.json", [output / "bench.png", output / "bench.svg"]


bench.__signature__ = signature_of(Asked, _OPTIONS, {"more": list[Path] | None})  # type: ignore[attr-defined]
