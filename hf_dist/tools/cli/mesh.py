"""`hf-dist mesh`: shows, before a job starts, which ranks hold what under a config and which links carry which bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_dist.config import axes_of, load_config
from hf_dist.dist.axes import RANKS_PER_MACHINE, Axes
from hf_dist.tools.cli.planned import meta_model, resolved_config, row_tokens
from hf_dist.tools.cli.written import to_write, writing

if TYPE_CHECKING:
    from hf_dist.planning.draw_mesh import Traffic
    from hf_dist.planning.role_parts import Part

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
    from hf_dist.planning.draw_mesh import draw_mesh
    from hf_dist.planning.role_parts import parts_of
    from hf_dist.tools.draw_roles import draw_roles

    parts = parts_of(load_config(config), ranks)
    axes = []
    for part in parts:
        if part.title:
            print(f"{part.title}; below, ranks are counted within the role")
        shown = _show(part, gpus_per_node, model if part.model is None else part.model or None, seq)
        axes.append(shown[0])
        picture = draw_mesh(*shown)
    if output is not None:
        with writing(output):
            (draw_roles(list(zip(parts, axes, strict=True))) if len(parts) > 1 else picture).save(output)
        print(f"wrote {output}")


def _show(part: Part, gpus_per_node: int, model: str | None, seq: int | None) -> tuple[Axes, list[int], Traffic | None]:
    """Print the axes of a role; returns them, the machine of each rank, and the bytes that a rank sends."""
    from hf_dist.planning.draw_mesh import mesh_lines

    read, ranks = part.config, part.ranks
    machines = [(part.first + rank) // gpus_per_node for rank in range(ranks)]
    axes, traffic, notes = axes_of(read, ranks, here=min(ranks, gpus_per_node)), None, list[str]()
    if model is not None and part.trains:
        from hf_dist.parallel.experts.spread import expert_counts
        from hf_dist.planning.planner import Planner, Workload

        meta = meta_model(model)
        axes = axes_of(read, ranks, here=min(ranks, gpus_per_node), experts=expert_counts(meta))
        resolved = resolved_config(read, ranks, None, meta)
        micro = resolved.train_micro_batch_size_per_gpu
        workload = Workload(micro if isinstance(micro, int) else 1, row_tokens(meta, seq))
        planner = Planner(meta, ranks, workload, ranks_per_machine=gpus_per_node)
        plan = planner.plan(resolved)
        traffic, axes = planner.traffic(resolved, plan), plan.states.in_blocks(axes)
        if axes.size("ep") > 1:
            traffic["ep"] = {"all_to_all": (0, planner.expert_nbytes(resolved))}
            notes = ["  (along ep: if all experts are chosen alike)"]
    print("\n".join([axes.describe(), *(f"  {line}" for line in mesh_lines(axes, machines, traffic)), *notes]))
    return axes, machines, traffic
