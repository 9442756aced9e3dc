"""What a rank does in the loading tests: load, prepare, compare with the model that one process loads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import hf_dist
from hf_dist.checkpoint.safetensors_source import bytes_read
from hf_dist.sharding.full_params import full_tensors
from hf_dist.sharding.lazy import lazy_sources
from tests.attempts import attempts_by_name
from tests.loading.checkpoints import CASES, inputs_for

SPOTS = 16 * 64
"""Bytes per file that the fingerprint reads."""


def prepare(model: Any, stage: int, **sections: Any) -> Any:
    """An engine that computes in the model's own dtype."""
    dtype = {"bf16": {"enabled": True}} if model.dtype == torch.bfloat16 else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    return hf_dist.initialize(model, config={**config, **dtype, **sections})


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter in full, in the dtype it was loaded in. Collective."""
    return {slot.name: full.clone() for group in engine.sharded.groups for slot, full in full_tensors(group)}


def logits(model: Any) -> torch.Tensor:
    """Of one batch, the same on every rank."""
    batch = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs_for(model).items()}
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**batch)[0].clone()


def compare(engine: Any, stock: Any) -> list[str]:
    """What differs between the prepared model and the one of a single process. Collective."""
    problems = []
    held = whole(engine)
    wanted = dict(stock.named_parameters())
    if set(held) != set(wanted):
        problems.append(f"names {sorted(set(held) ^ set(wanted))}")
    problems += [n for n in wanted if n in held and not torch.equal(held[n], wanted[n].detach())]
    buffers = dict(stock.named_buffers())
    problems += [n for n, b in engine.model.named_buffers() if not torch.equal(b, buffers[n])]
    return problems


def check_case(rank: int, world: int, name: str, path: Path, stage: int) -> list[str]:
    """Problems of one case at one stage; empty when all is equal."""
    case = CASES[name]
    torch.manual_seed(7)
    before = bytes_read()
    model = hf_dist.from_pretrained(case.load, path, **case.kwargs)
    streamed = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n in lazy_sources(model))
    engine = prepare(model, stage)
    read = bytes_read() - before
    torch.manual_seed(7)
    stock = case.load.from_pretrained(path, **case.kwargs)
    problems = compare(engine, stock)
    files = len(list(path.glob("*.safetensors")))
    stored = max(streamed, sum(f.stat().st_size for f in path.glob("*.safetensors")))
    # Shards begin at multiples of 64 elements, which is much of a model as small as these.
    limit = 1.2 * stored / world + files * SPOTS + len(engine.sharded.groups) * 64 * 4 + 1024
    if read > limit and "both stored" not in name:
        problems.append(f"{read} bytes read, at most {limit:.0f} expected")
    mine, theirs = logits(engine.model), logits(stock)
    if mine.dtype != torch.float16 and stock.dtype != torch.float16 and not torch.equal(mine, theirs):
        problems.append(f"logits differ by {(mine.float() - theirs.float()).abs().max()}")
    return problems


def check_all(rank: int, world: int, asked: list[tuple[str, Path, int]]) -> dict[str, list[str]]:
    """Problems by case and stage, of those that have any."""
    jobs = {f"{case[0]}, stage {case[2]}": functools.partial(check_case, rank, world, *case) for case in asked}
    return {name: problems for name, problems in attempts_by_name(rank, world, jobs).items() if problems}
