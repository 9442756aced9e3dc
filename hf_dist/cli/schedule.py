"""`hf-dist schedule`: shows a pipeline schedule, before a GPU is rented for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["schedule"]

Name = Annotated[str, typer.Option("--schedule", help="gpipe, 1f1b, interleaved_1f1b or zb_h1.")]
Stages = Annotated[int, typer.Option("--stages", help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option("--microbatches", help="Microbatches of one optimizer step.")]
Virtual = Annotated[int, typer.Option("--virtual-stages", help="Stages per rank, for interleaved_1f1b.")]
Output = Annotated[Path | None, typer.Option("--output", help="Also write the picture here, as .svg or .png.")]


def schedule(
    name: Name = "1f1b", stages: Stages = 4, microbatches: Microbatches = 8, virtual: Virtual = 1, output: Output = None
) -> None:
    """Draw a pipeline schedule with its bubble and the microbatches that each stage keeps."""
    from hf_dist.pipeline.draw import draw_schedule, draw_text
    from hf_dist.pipeline.schedule import make_schedule
    from hf_dist.pipeline.simulate import validate

    plan = make_schedule(name, stages, microbatches, virtual)
    validate(plan)
    print(draw_text(plan))
    if output is not None:
        draw_schedule(plan).save(output)
        print(f"wrote {output}")
