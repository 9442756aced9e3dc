"""`hf-dist plan`: will it fit, and what to change if it does not, before a GPU is rented for it."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_dist.axes import RANKS_PER_MACHINE
from hf_dist.config import (
    DistConfig,
    axes_of,
    hidden_size_of,
    load_config,
    read_config,
    resolve_without_trainer,
    with_elastic_batch,
)
from hf_dist.config.values import BadValue, is_auto, memory_nbytes
from hf_dist.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    from hf_dist.estimate.advice import Tried
    from hf_dist.estimate.memory_plan import Limits, MemoryPlan

__all__ = ["plan"]

_MICRO, _STEPS, _TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"

Model = Annotated[str, typer.Option(help="A model folder, or an ID of the hub; only its config.json is read.")]
Config = Annotated[Path, typer.Option(help="A DeepSpeed-style JSON file.")]
WorldSize = Annotated[int, typer.Option(help="Ranks of the job, one per device.", min=1)]
Device = Annotated[str | None, typer.Option("--device-memory", help="Of one device: 80GB.", show_default=False)]
Host = Annotated[
    str | None,
    typer.Option("--host-memory", help="Of one machine: 512GB, or 512GB/4 for 4 ranks on it.", show_default=False),
]
Seq = Annotated[str, typer.Option(help="Tokens per sample: 2048, 128k (131072), 1M (1048576).")]
Micro = Annotated[
    int | None, typer.Option("--micro-batch", help="Samples per rank and forward.", min=1, show_default=False)
]
Suggest = Annotated[
    Path | None, typer.Option(help="Write the cheapest configs that fit into this folder.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def plan(
    model: Model,
    config: Config,
    world_size: WorldSize = 1,
    device_memory: Device = None,
    host_memory: Host = None,
    seq: Seq = "2048",
    micro_batch: Micro = None,
    suggest: Suggest = None,
    as_json: AsJson = False,
) -> None:
    """Say how much memory a config needs per rank, whether that fits, and which single setting helps most.

    Of ranks on GPUs, where reductions run beside backward at every stage unless the file says no.
    What is "auto" in the file has the Trainer's default (one microbatch per step, fp32, no checkpointing): write what your
    script passes into the file, such as "activation_checkpointing": {"every_n_layers": 1} for gradient_checkpointing.
    """
    from hf_dist.estimate.advice import suggest as cheapest
    from hf_dist.estimate.advice import try_each
    from hf_dist.estimate.longest import longest_rows
    from hf_dist.estimate.overhead import estimated, measured_base
    from hf_dist.estimate.planner import Planner, Workload

    limits = _limits(device_memory, host_memory, world_size)
    meta = _meta_model(model)
    resolved = _resolved(load_config(config), world_size, micro_batch, meta)
    micro = resolved.train_micro_batch_size_per_gpu
    assert isinstance(micro, int)
    beside = functools.partial(estimated, world_size=world_size, base=measured_base())
    tokens = _tokens(seq)

    def planner_of(length: int) -> Planner:
        return Planner(meta, world_size, Workload(micro, length), limits.device, beside)

    planner = planner_of(tokens)
    now = planner.plan(resolved)
    ranks = resolved.sequence_parallel_size
    longest = longest_rows(lambda length: planner_of(length).plan(resolved), limits, ranks)
    tried = try_each(planner, resolved, limits)
    found = cheapest(planner, resolved, limits) if suggest is not None else []
    files = [] if suggest is None else _write(config, suggest, found)
    if as_json:
        print(json.dumps({**_as_dict(now, limits, tried, files), "longest_rows": longest}, indent=2))
        return
    print(f"{model}: microbatches of {micro} x {tokens} tokens, {world_size} ranks, {resolved.dtype}, {config}")
    print(_text(now, limits, tried, planner.expert_lines(resolved)))
    if longest is not None:
        shared = f", {longest // ranks} on each of {ranks} ranks" if ranks > 1 else ""
        print(f"longest rows that fit: {longest} tokens{shared}")
    if suggest is not None:
        for file, each in zip(files, found, strict=True):
            print(f"wrote {file}: {each.change.text or 'unchanged'}")
        if not files:
            print("nothing fits: more ranks, shorter samples, or a smaller model")


def _tokens(text: str) -> int:
    """`128k` is 131072, `1M` 1048576."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    number = text[:-1] if factor > 1 else text
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(Problem("--seq", repr(text), "is not a number of tokens", "Write 2048, 128k or 1M."))
    return int(number) * factor


def _text(now: MemoryPlan, limits: Limits, tried: list[Tried], experts: list[str]) -> str:
    from hf_dist.estimate.describe import plan_table, settings, verdict

    where = f", pipeline rank {now.stage}" if now.states.config.pipeline.stages > 1 else ""
    parts = {
        f"per rank{where}": plan_table(now),
        "verdict": verdict(now, limits),
        "experts": experts,
        "one setting": settings(tried, limits) or ["nothing that hf_dist has a setting for saves memory here"],
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
    from hf_dist.estimate.memory_plan import Limits

    size, _, ranks = (host or "").partition("/")
    if ranks and not ranks.strip().isdigit():
        raise ConfigError(Problem("--host-memory", repr(host), "is not a size and a number of ranks", "Write 512GB/4."))
    on_machine = int(ranks) if ranks else min(world_size, RANKS_PER_MACHINE)
    return Limits(_nbytes("--device-memory", device), _nbytes("--host-memory", size or None), on_machine)


def _nbytes(option: str, text: str | None) -> int | None:
    """`80GB` in units of 1000, `80GiB` in units of 1024; a plain number is bytes."""
    try:
        return None if text is None else memory_nbytes(text)
    except BadValue as bad:
        raise ConfigError(Problem(option, repr(text), bad.clause, bad.fix)) from None


def _meta_model(model: str) -> Any:
    """The class that the model's config names, without memory, in the dtype of its weights."""
    import torch
    import transformers

    from hf_dist.hf.model_class import architecture_of, model_config, new_model

    config = model_config(model)
    name = architecture_of(config)
    try:
        with torch.device("meta"):
            return new_model(name if hasattr(transformers, name) else "AutoModelForCausalLM", config)
    except Exception as error:  # whatever a model's own code does
        raise ModelError(f"--model {model}: {name or 'its class'} cannot be made on meta: {error}") from error


def _resolved(read: DistConfig, world_size: int, micro: int | None, model: Any) -> DistConfig:
    """The config as a Trainer would resolve it, as far as memory is concerned; what is not known has HF's defaults."""
    ranks = axes_of(read, world_size).size("data")
    changes: dict[str, tuple[Any, str]] = {"elasticity.enabled": (False, "plan")}
    read = with_elastic_batch(read, ranks)
    own = {path: read.value_at(path) for path in (_MICRO, _STEPS, _TRAIN)}
    own = {path: None if is_auto(value) else value for path, value in own.items()}
    micro = micro or own[_MICRO] or 1
    from_train = own[_TRAIN] // (micro * ranks) if own[_TRAIN] else 0
    steps = own[_STEPS] or from_train or 1
    changes |= {_MICRO: (micro, "file"), _STEPS: (steps, "file"), _TRAIN: (None, "plan")}
    for path in ("bf16.enabled", "fp16.enabled"):
        if is_auto(read.value_at(path)):
            changes[path] = (False, "plan")
    if is_auto(read.hf_dist.tiled_loss) or read.source_of("hf_dist.tiled_loss") == "default":
        changes["hf_dist.tiled_loss"] = (True, "plan")
    config = read.replaced(changes)
    optimizer = config.optimizer
    if optimizer is not None:
        known = {key: value for key, value in optimizer.params.items() if not is_auto(value)}
        optimizer = optimizer.model_copy(update={"params": known})
    config = config.model_copy(update={"optimizer": optimizer, "scheduler": None})
    return resolve_without_trainer(config, data_ranks=ranks, hidden_size=hidden_size_of(model.config), on_gpu=True)


def _write(config: Path, folder: Path, found: list[Tried]) -> list[Path]:
    """The user's file with the changes, one file per suggestion."""
    folder.mkdir(parents=True, exist_ok=True)
    data = read_config(config).data
    data.pop("$schema", None)  # a path relative to the file it was in
    files = []
    for number, each in enumerate(found, start=1):
        changed = copy.deepcopy(data)
        for path, value in each.change.values.items():
            *sections, key = path.split(".")
            section = changed
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = value
        file = folder / f"{config.stem}_{number}.json"
        file.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
        load_config(file)
        files.append(file)
    return files
