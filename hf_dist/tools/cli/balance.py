"""`hf-dist balance`: how evenly a training has used its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_dist.tools.cli.written import to_write, writing

__all__ = ["balance"]

Folder = Annotated[Path, typer.Argument(help="The output folder of a Trainer, or its expert_load.json.")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Also write the picture here, as .svg or .png.", show_default=False, callback=to_write("picture")
    ),
]


def balance(folder: Folder, output: Output = None) -> None:
    """Show which experts of which layers got how many rows, and how unevenly ranks were loaded."""
    from hf_dist.parallel.experts.draw_balance import balance_lines, draw_balance
    from hf_dist.parallel.experts.load_file import read_load

    load = read_load(folder)
    print("\n".join(balance_lines(load)))
    if output is not None:
        with writing(output):
            draw_balance(load).save(output)
        print(f"wrote {output}")
