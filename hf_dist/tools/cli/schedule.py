"""`hf-dist schedule`: shows a pipeline schedule, before a GPU is rented for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_dist.tools.cli.terminal import terminal_width
from hf_dist.tools.cli.written import to_write, writing

__all__ = ["schedule"]

Config = Annotated[
    Path | None, typer.Option("--config", help="Take what is not given from this file.", show_default=False)
]
Name = Annotated[str | None, typer.Option("--schedule", help="gpipe, 1f1b, interleaved_1f1b or zb_h1; default 1f1b.")]
Stages = Annotated[int | None, typer.Option("--stages", help="Pipeline ranks; default 4.")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", help="Of one optimizer step: gradient_accumulation_steps; default 8.")
]
Virtual = Annotated[int | None, typer.Option("--virtual-stages", help="Stages per rank, for interleaved_1f1b.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", help="Also write the picture here, as .svg or .png.", callback=to_write("picture")),
]


def schedule(
    config: Config = None,
    name: Name = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    virtual: Virtual = None,
    output: Output = None,
) -> None:
    """Draw a pipeline schedule with its bubble and the microbatches that each stage keeps."""
    from hf_dist.config import load_config
    from hf_dist.errors import ConfigError, Problem
    from hf_dist.parallel.pipeline.draw import draw_schedule, draw_text
    from hf_dist.parallel.pipeline.schedule import make_schedule
    from hf_dist.parallel.pipeline.simulate import validate

    read = None if config is None else load_config(config)
    if read is not None:
        section, steps = read.pipeline, read.gradient_accumulation_steps
        if section.stages == 1 and stages is None:
            fix = 'Pass --stages 4, or set "pipeline": {"stages": 4} in the file.'
            raise ConfigError(
                Problem("pipeline.stages", "1", "is no pipeline: there is no schedule to draw", fix, str(config))
            )
        name, stages = name or section.schedule, section.stages if stages is None else stages
        virtual = section.virtual_stages if virtual is None else virtual
        microbatches = steps if microbatches is None and isinstance(steps, int) else microbatches
    if name == "interleaved_1f1b" and virtual is None:
        virtual = 2
    if name == "interleaved_1f1b" and virtual == 1:
        fix = 'Pass --virtual-stages 2, or the schedule "1f1b".'
        raise ConfigError(Problem("pipeline.virtual_stages", "1", 'makes "interleaved_1f1b" the same as "1f1b"', fix))
    plan = make_schedule(
        name or "1f1b",
        4 if stages is None else stages,
        8 if microbatches is None else microbatches,
        1 if virtual is None else virtual,
    )
    validate(plan)
    print(draw_text(plan, line_width=terminal_width()))
    if output is not None:
        with writing(output):
            draw_schedule(plan).save(output)
        print(f"wrote {output}")
