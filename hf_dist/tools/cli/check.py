"""`hf-dist check`: does your layout give the same numbers as one process? On your model, config and data, on this machine."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hf_dist.tools.check import Asked, Proof

__all__ = ["check"]

Model = Annotated[str, typer.Option(help="A model folder, or an ID of the hub.")]
Config = Annotated[Path, typer.Option(help="A DeepSpeed-style JSON file.")]
Ranks = Annotated[int, typer.Option(help="Processes to start on this machine (gloo, CPU).", min=1)]
Steps = Annotated[int, typer.Option(help="Optimizer steps.", min=1)]
Layers = Annotated[
    int | None,
    typer.Option("--num-layers", help="Keep this many layers, with random weights.", min=1, show_default=False),
]
Class = Annotated[
    str | None,
    typer.Option("--class", help="module:Class; default: the class in config.json.", show_default=False),
]
Data = Annotated[
    Path | None,
    typer.Option(help="JSON lines (input_ids or text, labels), or a text file; default: made up.", show_default=False),
]
Seq = Annotated[int, typer.Option(help="Tokens per row.", min=2)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def check(
    model: Model,
    config: Config,
    ranks: Ranks = 2,
    steps: Steps = 5,
    num_layers: Layers = None,
    class_name: Class = None,
    data: Data = None,
    seq: Seq = 64,
    as_json: AsJson = False,
) -> None:
    """Check that a config on several ranks gives the numbers of one process: loss, gradient norm, weights, save and resume.

    Exit code 0: equal. 1: different, and the output names the first differing tensor; with several axes each then runs alone.
    """
    from hf_dist.tools.check import Asked, prepare, prove, quiet

    asked = Asked(
        model=model,
        config=config,
        world=ranks,
        steps=steps,
        num_layers=num_layers,
        class_name=class_name,
        data=data,
        seq=seq,
    )
    if "" not in sys.path:
        sys.path.insert(0, "")  # --class may name a file in the current folder
    with quiet(), tempfile.TemporaryDirectory(prefix="hf_dist_check_") as folder:
        job = prepare(asked, Path(folder))
        try:
            proof = prove(job, ranks)
        except RuntimeError as error:
            print(f"the check could not be run: {error}", file=sys.stderr)
            sys.exit(1)
    if as_json:
        print(json.dumps(proof.as_dict, indent=2))
    else:
        _print(asked, proof)
    if not proof.equal:
        sys.exit(1)


def _print(asked: Asked, proof: Proof) -> None:
    console = Console(width=max(140, Console().width), highlight=False)
    where = f"on {asked.world} ranks, {proof.precision}, against one process"
    console.print(f"{asked.model}, {asked.config}, {where}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("", "one process", "this layout", "difference", "allowed", ""):
        table.add_column(name, no_wrap=True)
    for row in proof.rows:
        mark = "equal" if row.equal else "DIFFERS"
        table.add_row(row.what, row.alone, row.layout, f"{row.difference:.1e}", f"{row.allowed:.1e}", mark)
    console.print(table)
    for note in proof.notes:
        console.print(f"note: {note}", markup=False)
    if proof.differs:
        more = f" and {len(proof.differs) - 1} more tensors" if len(proof.differs) > 1 else ""
        console.print(f"first to differ: {proof.differs[0]}{more}, after step {proof.differs_at}", markup=False)
    for part in proof.blamed:
        first = f", first: {part.first}" if part.first else ""
        outcome = "equal" if part.equal else f"fails: {part.error}" if part.error else f"differs{first}"
        console.print(f"{part.what}: {outcome}", markup=False)
    if proof.blamed:
        console.print(f"likely to blame: {proof.to_blame}", markup=False)
    console.print("equal" if proof.equal else "NOT equal")
