"""`hf-dist mesh`: shows, before a job starts, which ranks hold what under a config and which links carry which bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_dist.config import axes_of, load_config
from hf_dist.dist.axes import RANKS_PER_MACHINE
from hf_dist.tools.cli.planned import meta_model, resolved_config, row_tokens
from hf_dist.tools.cli.written import to_write, writing

__all__ = ["mesh"]

Config = Annotated[Path, typer.Option(help="A DeepSpeed-style JSON file.")]
Ranks = Annotated[int, typer.Option(help="Ranks of the job, one per device.", min=1)]
PerNode = Annotated[int, typer.Option("--gpus-per-node", help="Ranks per machine.", min=1)]
Model = Annotated[str | None, typer.Option(help="A model folder or ID, to show bytes, too.", show_default=False)]
Seq = Annotated[
    int | None,
    typer.Option(
        help="Tokens per row, for the bytes; default: 2048, or all positions of the model if fewer.",
        min=2,
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Also write the picture here, as .svg or .png.", show_default=False, callback=to_write("picture")
    ),
]


def mesh(
    config: Config,
    ranks: Ranks = 8,
    gpus_per_node: PerNode = RANKS_PER_MACHINE,
    model: Model = None,
    seq: Seq = None,
    output: Output = None,
) -> None:
    """Show which ranks hold what along each axis of a config, and with a model the bytes that a rank sends in a step."""
    from hf_dist.planning.draw_mesh import draw_mesh, mesh_lines

    read = load_config(config)
    machines = [rank // gpus_per_node for rank in range(ranks)]
    axes, traffic, notes = axes_of(read, ranks, here=min(ranks, gpus_per_node)), None, list[str]()
    if model is not None:
        from hf_dist.parallel.experts.spread import expert_counts
        from hf_dist.planning.planner import Planner, Workload

        meta = meta_model(model)
        axes = axes_of(read, ranks, here=min(ranks, gpus_per_node), experts=expert_counts(meta))
        resolved = resolved_config(read, ranks, None, meta)
        micro = resolved.train_micro_batch_size_per_gpu
        planner = Planner(meta, ranks, Workload(micro if isinstance(micro, int) else 1, row_tokens(meta, seq)))
        traffic = planner.traffic(resolved)
        if axes.size("ep") > 1:
            traffic["ep"] = {"all_to_all": (0, planner.expert_nbytes(resolved))}
            notes = ["  (along ep: if all experts are chosen alike)"]
    print("\n".join([axes.describe(), *(f"  {line}" for line in mesh_lines(axes, machines, traffic)), *notes]))
    if output is not None:
        with writing(output):
            draw_mesh(axes, machines, traffic).save(output)
        print(f"wrote {output}")
