"""`hf-dist export`, `inspect`, `checkpoint verify`, `checkpoint data`: a checkpoint's model, what it is, what it has seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_dist.format_bytes import size_text
from hf_dist.tools.cli.written import to_write

if TYPE_CHECKING:
    from hf_dist.checkpoint.describe import Description

__all__ = ["app", "export", "inspect", "verify"]

app = typer.Typer(help="Verify checkpoints, every byte of them; tell which rows a run has seen.", no_args_is_help=True)

LISTED = 40
"""Most files that `inspect` names before it only counts them."""

Folder = Annotated[Path, typer.Argument(help="A folder such as out/checkpoint-100.", show_default=False)]
Out = Annotated[
    Path, typer.Argument(help="The HF folder to write; new or empty.", show_default=False, callback=to_write("folder"))
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16 or fp32 (from the master weights, if there are any).")
]
Size = Annotated[str, typer.Option("--max-shard-size", help="Largest weight file, such as 5GB.")]
Merge = Annotated[bool, typer.Option("--merge-lora", help="Add the LoRA adapter in the folder to its base model.")]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        help="With --merge-lora: the base model, a folder or an ID; default: the one that the adapter names.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def export(
    checkpoint: Folder,
    out: Out,
    dtype: Dtype = None,
    max_shard_size: Size = "5GB",
    merge_lora: Merge = False,
    base: Base = None,
) -> None:
    """Write the model of a checkpoint as an HF folder, in another dtype or split into other files. Needs no GPU."""
    from hf_dist.checkpoint.export import export as write

    write(checkpoint, out, dtype=dtype, max_shard_size=max_shard_size, merge_lora=merge_lora, base=base, report=print)


def inspect(checkpoint: Folder, as_json: Json = False) -> None:
    """Describe a checkpoint of any program, and whether it is complete. Exit code 1 if it is not."""
    from hf_dist.checkpoint.describe import describe

    found = describe(checkpoint)
    print(json.dumps(found.to_json(), indent=1) if as_json else _text(found))
    if not found.complete:
        raise typer.Exit(1)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints.", show_default=False)],
) -> None:
    """Compare every byte of checkpoints with the digests taken when they were written. Exit code 1 if one is damaged."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from hf_dist.checkpoint.verify import checkpoints_in, written_nbytes
    from hf_dist.checkpoint.verify import verify as verdicts

    paths = checkpoints_in(folder)
    whole = True
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("reading", total=sum(map(written_nbytes, paths)))
        for verdict in verdicts(paths, lambda nbytes: progress.advance(task, nbytes)):
            whole &= verdict.whole
            progress.console.print(
                f"{verdict.path}: {size_text(verdict.nbytes)}, {'whole' if verdict.whole else 'DAMAGED'}",
                *(f"  problem   {problem}" for problem in verdict.problems),
                sep="\n", markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
    if not whole:
        raise typer.Exit(1)


@app.command()
def data(checkpoint: Folder, as_json: Json = False) -> None:
    """Tell which rows a run has seen: of each lane of a stream in the current epoch, or how many of a set with an index."""
    from hf_dist.checkpoint.data_seen import data_seen

    seen = data_seen(checkpoint)
    if as_json:
        print(json.dumps(seen.to_json(), indent=1))
        return
    print(f"{seen.path}: step {seen.step}, epoch {seen.epoch} (from 0), {seen.rows:,} rows of it seen")
    for lane, rows in enumerate(seen.lanes[:LISTED]):
        print(f"  lane {lane:>4}  {rows:>12,} rows, of the shards {lane}, {lane + len(seen.lanes)}, ...")
    if len(seen.lanes) > LISTED:
        print(f"  ... and {len(seen.lanes) - LISTED} more lanes (--json names all)")


def _text(found: Description) -> str:
    lines = [f"{found.path}: {found.kind}, {'complete' if found.complete else 'NOT COMPLETE'}"]
    lines += [f"  problem   {problem}" for problem in found.problems]
    if found.step is not None:
        lines.append(f"  step      {found.step}")
    if found.layout:
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.layout.items())
        lines.append(f"  saved by  hf_dist {found.hf_dist}: {facts}")
    if found.weights:
        dtypes = ", ".join(f"{numel:,} {name}" for name, numel in found.weights["by_dtype"].items())
        lines.append(
            f"  weights   {size_text(found.weights['bytes'])} in {found.weights['files']} files: "
            f"{found.weights['tensors']} tensors ({dtypes})"
        )
    if found.state:
        optimizer = ", ".join(found.state["optimizer_states"]) or "no optimizer state"
        lines.append(
            f"  training  {size_text(found.state['bytes'])}: master weights of {found.state['master_weights']} parameters "
            f"({found.state['elements']:,} elements), {optimizer}"
        )
    for each in found.checkpoints:
        state = "complete" if each["complete"] else "NOT COMPLETE"
        lines.append(f"  {each['name']}: step {each['step']}, {state}, {size_text(each['bytes'])}")
    lines.append(f"  files     {len(found.files)}, {size_text(sum(found.files.values()))}")
    listed = list(found.files.items())
    lines += [f"    {size_text(nbytes):>9}  {name}" for name, nbytes in listed[:LISTED]]
    if len(listed) > LISTED:
        lines.append(f"    ... and {len(listed) - LISTED} more (--json names all)")
    return "\n".join(lines)
