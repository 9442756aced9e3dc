"""`hf-dist plan`: does a config fit, and what should change if it does not, before a GPU is rented."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_dist.config import canonical, load_config
from hf_dist.config.values import BadValue, memory_nbytes
from hf_dist.dist.axes import RANKS_PER_MACHINE
from hf_dist.errors import ConfigError, Problem
from hf_dist.format_bytes import size_text
from hf_dist.tools.cli.layouts import AskedLayouts, print_layouts
from hf_dist.tools.cli.options import signature_of
from hf_dist.tools.cli.planned import EXIT_DOES_NOT_FIT, meta_model, resolved_config, row_tokens, suggestions
from hf_dist.tools.cli.written import to_write, write_texts

if TYPE_CHECKING:
    from torch import nn

    from hf_dist.config import DistConfig
    from hf_dist.planning.advice import Tried
    from hf_dist.planning.memory_plan import Limits, MemoryPlan
    from hf_dist.planning.role_parts import Part

__all__ = ["plan"]

_OPTIONS: dict[str, Any] = {
    "model": typer.Option(help="A model folder, or an ID of the hub; only its config.json is read."),
    "config": typer.Option(
        help="A DeepSpeed-style JSON file; with --gpus, the base config for layouts.", show_default=False
    ),
    "world_size": typer.Option(help="Ranks of the job, one per device.", min=1),
    "device_memory": typer.Option(help="Memory of one device, such as 80GB.", show_default=False),
    "host_memory": typer.Option(help="Memory of one machine: 512GB, or 512GB/4 for 4 ranks.", show_default=False),
    "seq": typer.Option(
        help="Tokens per sample: 2048, 128k (131072), 1M (1048576); default: 2048, or all positions of the model if fewer.",
        show_default=False,
    ),
    "micro_batch": typer.Option(help="Samples per rank and forward.", min=1, show_default=False),
    "suggest": typer.Option(
        help="Write the cheapest configs that fit into this folder.", show_default=False, callback=to_write("folder")
    ),
    "json": typer.Option("--json", help="Print JSON, for programs."),
    "gpus": typer.Option(help="Find the fastest layouts on this many GPUs.", min=1, show_default=False),
    "gpus_per_node": typer.Option(help="GPUs per machine.", min=1),
    "global_batch": typer.Option(help="With --gpus: rows per step, such as 512, or 4M-tokens.", show_default=False),
    "output": typer.Option(
        help="With --gpus: also draw the layouts here, as .svg or .png.",
        show_default=False,
        callback=to_write("picture"),
    ),
}


_NO_VERDICT = "device: not known; --device-memory 80GB says whether it fits"


@dataclass(frozen=True)
class Asked:
    """The command's options."""

    model: str
    config: Path | None = None
    world_size: int = 1
    device_memory: str | None = None
    host_memory: str | None = None
    seq: str | None = None
    micro_batch: int | None = None
    suggest: Path | None = None
    json: bool = False
    gpus: int | None = None
    gpus_per_node: int = RANKS_PER_MACHINE
    global_batch: str | None = None
    output: Path | None = None


def plan(**options: Any) -> None:
    """Print how much memory a config needs per rank, whether it fits, and which single setting helps most.

    With --gpus: print the fastest layouts on that many GPUs, over all axes and stages that fit, and why the others are slower.
    The plan is for GPUs, where reductions overlap backward at every stage unless the file disables it.
    An "auto" in the file means the Trainer's default (one microbatch per step, fp32, no checkpointing). So write your
    script's arguments into the file, for example "activation_checkpointing": {"every_n_layers": 1} for gradient_checkpointing.

    Exit code 3: --device-memory or --host-memory is too small for the config, or with --gpus for every layout. 1: an error.
    """
    asked = Asked(**options)
    if asked.gpus is not None:
        host = f"{asked.host_memory}/{asked.gpus_per_node}" if asked.host_memory else None
        limits = _limits(asked.device_memory, host, asked.gpus)
        per_node, batch, meta = asked.gpus_per_node, asked.global_batch, meta_model(asked.model)
        tokens = row_tokens(meta, None if asked.seq is None else _tokens(asked.seq))
        wanted = AskedLayouts(asked.model, asked.config, asked.gpus, per_node, tokens, batch, limits)
        print_layouts(wanted, meta, suggest=asked.suggest, output=asked.output, as_json=asked.json)
    elif asked.config is None:
        raise ConfigError(Problem("--config", "", "is missing", "Name a JSON file, or --gpus to look for layouts."))
    else:
        _plan_config(asked, asked.config)


def _plan_config(asked: Asked, config: Path) -> None:
    from hf_dist.planning.advice import suggest as cheapest
    from hf_dist.planning.advice import try_each
    from hf_dist.planning.longest import longest_rows
    from hf_dist.planning.overhead import estimated, measured_base
    from hf_dist.planning.planner import Planner, Workload
    from hf_dist.planning.positions import positions_of
    from hf_dist.planning.role_parts import parts_of

    trainer, *rest = parts_of(load_config(config), asked.world_size)
    meta = meta_model(asked.model)
    if trainer.model is not None:
        _plan_serving(asked, [trainer, *rest], row_tokens(meta, None if asked.seq is None else _tokens(asked.seq)))
        return
    others, servers = [part for part in rest if part.model], [part for part in rest if part.averages]
    world = trainer.ranks
    limits = _limits(asked.device_memory, asked.host_memory, world)
    resolved = resolved_config(trainer.config, world, asked.micro_batch, meta)
    micro = resolved.train_micro_batch_size_per_gpu
    assert isinstance(micro, int)
    beside = functools.partial(estimated, base=measured_base())
    tokens = row_tokens(meta, None if asked.seq is None else _tokens(asked.seq))

    def planner_of(length: int) -> Planner:
        return Planner(meta, world, Workload(micro, length), limits.device, beside)

    planner = planner_of(tokens)
    now = planner.plan(resolved)
    ranks = resolved.sequence_parallel_size
    longest = longest_rows(lambda length: planner_of(length).plan(resolved), limits, ranks, positions_of(meta))
    tried = try_each(planner, resolved, limits)
    found = cheapest(planner, resolved, limits) if asked.suggest is not None else []
    files: dict[Path, str] = {}
    if asked.suggest is not None:
        files = suggestions(config.stem, canonical(config), asked.suggest, [each.change.values for each in found])
    if asked.json:
        roles: dict[str, Any] = {part.name: _role_plan(part, micro, tokens).as_dict() for part in others}
        roles |= {part.name: {"bytes": _server_nbytes(part, meta, resolved)} for part in servers}
        more: dict[str, Any] = {"longest_rows": longest, **({"roles": roles} if roles else {})}
        if eights := planner.eights_lines(resolved):
            more["products_in_float8"] = eights
        print(json.dumps({**_as_dict(now, limits, tried, list(files)), **more}, indent=2))
        write_texts(files)
        _end(limits, [trainer, *others], [now, *(_role_plan(part, micro, tokens) for part in others)])
        return
    if trainer.title:
        print(trainer.title)
    print(f"{asked.model}: microbatches of {micro} x {tokens} tokens, {world} ranks, {resolved.dtype}, {config}")
    sections = {
        "experts": planner.expert_lines(resolved),
        "products in float8": planner.eights_lines(resolved),
        "encoded messages, which change the numbers": planner.form_lines(resolved, now),
    }
    print(_text(now, limits, tried, sections))
    if longest is not None:
        shared = f", {longest // ranks} on each of {ranks} ranks" if ranks > 1 else ""
        print(f"longest rows that fit: {longest} tokens{shared}")
    write_texts(files)
    if asked.suggest is not None:
        for file, each in zip(files, found, strict=True):
            print(f"wrote {file}: {each.change.text or 'unchanged'}")
        if not files:
            print("nothing fits: use more ranks, shorter samples, or a smaller model")
    plans = [_role_plan(part, micro, tokens) for part in others]
    for part, its in zip(others, plans, strict=True):
        print(_role_text(part, its, limits))
    for part in servers:
        nbytes = _server_nbytes(part, meta, resolved)
        print(
            f"{part.title}: {size_text(nbytes)} on the host for weights and momentum, as much again while a replica pushes"
        )
    _end(limits, [trainer, *others], [now, *plans])


def _server_nbytes(part: Part, meta: nn.Module, config: DistConfig) -> int:
    """Bytes of a rank of a server of replicas, at rest: fp32 weights, momentum and the sum of a round."""
    numel = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    return 4 * (3 if config.local_sgd.outer_momentum else 1) * -(-numel // part.ranks)


def _plan_serving(asked: Asked, parts: list[Part], tokens: int) -> None:
    """Of a start that serves other jobs, and trains nothing."""
    limits = _limits(asked.device_memory, asked.host_memory, asked.world_size)
    served = [part for part in parts if part.model]
    plans = [_role_plan(part, asked.micro_batch or 1, tokens) for part in served]
    if asked.json:
        print(
            json.dumps({"roles": {part.name: its.as_dict() for part, its in zip(served, plans, strict=True)}}, indent=2)
        )
    else:
        print("\n".join(_role_text(part, its, limits) for part, its in zip(served, plans, strict=True)))
    _end(limits, served, plans)


def _role_plan(part: Part, micro: int, tokens: int) -> MemoryPlan:
    """Memory of a rank of another role, for the trainer's microbatches."""
    from hf_dist.planning.planner import Planner, Workload

    assert part.model is not None
    meta = meta_model(part.model)
    meta.requires_grad_(part.trains)
    return Planner(meta, part.ranks, Workload(micro, tokens)).plan(
        resolved_config(part.config, part.ranks, micro, meta)
    )


def _role_text(part: Part, its: MemoryPlan, limits: Limits) -> str:
    from hf_dist.planning.describe import plan_table, verdict

    lines = (
        [*plan_table(its), *verdict(its, limits)]
        if part.trains
        else [f"weights, at rest  {size_text(_resting(its))}  exact; a forward's activations come on top"]
    )
    return "\n".join([f"{part.title}: {part.model}", *(f"  {line}" for line in lines)])


def _resting(its: MemoryPlan) -> int:
    from hf_dist.memory.offload.resting import Tier

    return its.states.nbytes.resident(Tier.DEVICE)


def _end(limits: Limits, parts: list[Part], plans: list[MemoryPlan]) -> None:
    for part, its in zip(parts, plans, strict=True):
        frozen_is_over = limits.device is not None and _resting(its) > limits.device
        if its.over(limits) if part.trains else frozen_is_over:
            raise typer.Exit(EXIT_DOES_NOT_FIT)


plan.__signature__ = signature_of(Asked, _OPTIONS)  # type: ignore[attr-defined]


def _tokens(text: str) -> int:
    """`128k` is 131072, `1M` 1048576."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    number = text[:-1] if factor > 1 else text
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(Problem("--seq", repr(text), "is not a number of tokens", "Write 2048, 128k or 1M."))
    return int(number) * factor


def _text(now: MemoryPlan, limits: Limits, tried: list[Tried], sections: dict[str, list[str]]) -> str:
    from hf_dist.planning.describe import plan_table, settings, verdict

    title = "would save more" if limits.device and not now.over(limits) else "one setting"
    where = f", pipeline rank {now.stage}" if now.states.config.pipeline.stages > 1 else ""
    parts = {
        f"per rank{where}": plan_table(now),
        "verdict": [*verdict(now, limits), *([] if limits.device else [_NO_VERDICT])],
        **sections,
        title: settings(tried, limits) or ["nothing that hf_dist has a setting for saves memory here"],
    }
    return "\n".join("\n".join([name, *(f"  {line}" for line in lines)]) for name, lines in parts.items() if lines)


def _as_dict(now: MemoryPlan, limits: Limits, tried: list[Tried], files: list[Path]) -> dict[str, Any]:
    changes = [
        {
            "text": each.change.text,
            "values": dict(each.change.values),
            "saved": each.saved,
            "host": each.plan.host,
            "fits": not each.plan.over(limits),
        }
        for each in tried
    ]
    known = limits.device is not None or limits.host is not None
    fits = not now.over(limits) if known else None
    return {**now.as_dict(), "fits": fits, "settings": changes, "suggestions": [str(file) for file in files]}


def _limits(device: str | None, host: str | None, world_size: int) -> Limits:
    from hf_dist.planning.memory_plan import Limits

    size, _, ranks = (host or "").partition("/")
    if ranks and not ranks.strip().isdigit():
        raise ConfigError(Problem("--host-memory", repr(host), "is not a size and a number of ranks", "Write 512GB/4."))
    on_machine = int(ranks) if ranks else min(world_size, RANKS_PER_MACHINE)
    return Limits(_nbytes("--device-memory", device), _nbytes("--host-memory", size or None), on_machine)


def _nbytes(option: str, text: str | None) -> int | None:
    """`80GB` in units of 1000, `80GiB` in units of 1024. Raises `ConfigError` for a number without a unit."""
    try:
        return None if text is None else memory_nbytes(text)
    except BadValue as bad:
        raise ConfigError(Problem(option, repr(text), bad.clause, bad.fix)) from None
