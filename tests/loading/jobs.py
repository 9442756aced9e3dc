"""Jobs of `test_ranks.py`: each runs on every rank, between others in the same processes, and returns what went wrong."""

from __future__ import annotations

import ctypes
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf

import hf_dist
from hf_dist.checkpoint.safetensors_source import bytes_read
from hf_dist.errors import CheckpointError, ModelError
from hf_dist.sharding.consistency import check_load
from hf_dist.sharding.lazy import lazy_source, lazy_sources
from tests.loading.on_ranks import compare, logits, prepare

Load = tf.AutoModelForCausalLM


def _error_of(job: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        job()
    except kind as error:
        return str(error)
    return "no error"


def read_on_one_rank(rank: int, world: int, path: Path) -> list[Any]:
    """A norm that only rank 0 prints."""
    problems = []
    for stage in range(4):
        model = hf_dist.from_pretrained(Load, path)
        if rank == 0:
            model.lm_head.weight.norm()
        problems += compare(prepare(model, stage), Load.from_pretrained(path))
    return problems


def changed_model(rank: int, world: int, path: Path) -> list[Any]:
    """New rows and adapters from different seeds: those of rank 0 everywhere. Groups mix lazy and ordinary parameters."""

    def change(model: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        model.resize_token_embeddings(120)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        for p in model.model.layers[0].parameters():
            p.requires_grad_(False)
        return peft.get_peft_model(model, config)

    problems = []
    stock = change(Load.from_pretrained(path), seed=0)
    for stage in range(4):
        model = change(hf_dist.from_pretrained(Load, path), seed=rank)
        engine = prepare(model, stage)
        problems += compare(engine, stock)
        if not torch.equal(logits(engine.model), logits(stock)):
            problems.append(f"stage {stage}: logits differ")
    return problems


def different_files(rank: int, world: int, path: Path) -> list[Any]:
    """Rank 1 has another checkpoint of the same shapes."""
    other = path.parent / "other"
    prepare(Load.from_pretrained(path), 0)  # starts the process group
    if rank == 0:
        model = Load.from_pretrained(path)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        model.save_pretrained(other)
    torch.distributed.barrier()
    model = hf_dist.from_pretrained(Load, other if rank == 1 else path)
    message = _error_of(lambda: prepare(model, 3), ModelError)
    return [] if "different files on rank 0 and rank 1" in message else [message]


def vanished_on_one_rank(rank: int, world: int, path: Path) -> list[Any]:
    """Both ranks hear of it, none waits for ever."""
    mine = path.parent / f"copy{rank}"
    shutil.copytree(path, mine, dirs_exist_ok=True)
    model = hf_dist.from_pretrained(Load, mine)
    if rank == 1:
        (mine / "model.safetensors").unlink()
    message = _error_of(lambda: prepare(model, 1), CheckpointError)
    return [] if message.startswith("rank 1: ") and "copy1" in message else [message]


def wrong_bytes_on_one_rank(rank: int, world: int, path: Path) -> list[Any]:
    """A reader that is wrong on one rank is found on all, with the name."""
    problems = []
    for stage in (0, 3):
        model = hf_dist.from_pretrained(Load, path)
        source: Any = lazy_source(model.lm_head.weight)
        if rank == 1:
            source.read = lambda start, stop, out: out.zero_()
        message = _error_of(lambda: prepare(model, stage), ModelError)  # noqa: B023
        if "parameter lm_head.weight is not what its file says (shard 1)" not in message:
            problems.append(message)
    return problems


def wrong_replicas(rank: int, world: int, path: Path) -> list[Any]:
    """A buffer, and a replicated weight, that became different."""
    model = hf_dist.from_pretrained(Load, path)
    sources = lazy_sources(model)
    engine = prepare(model, 1)
    groups, mesh = engine.sharded.groups, engine.sharded.mesh
    check_load(model, groups, sources, mesh)
    if rank == 1:
        model.model.rotary_emb.inv_freq.add_(1)
        with torch.no_grad():
            model.model.norm.weight.add_(1)
    message = _error_of(lambda: check_load(model, groups, sources, mesh), ModelError)
    wanted = ("buffer model.rotary_emb.inv_freq differs between ranks [0] and [1]", "parameter model.norm.weight")
    return [] if all(text in message for text in wanted) else [message]


def hybrid_shards(rank: int, world: int, path: Path) -> list[Any]:
    """Shards among half of the ranks, each half reading all of the file."""
    before = bytes_read()
    model = hf_dist.from_pretrained(Load, path)
    total = sum(p.nbytes for p in model.parameters())
    problems: list[Any] = []
    engine = prepare(model, 3, zero_optimization={"stage": 3, "mics_shard_size": world // 2})
    problems += compare(engine, Load.from_pretrained(path))
    if bytes_read() - before > 1.2 * total / (world // 2) + 4096:
        problems.append(f"{bytes_read() - before} of {total} bytes read")
    return problems


def poisoned_memory(rank: int, world: int, path: Path) -> list[Any]:
    """Memory that nobody has written holds garbage: new storage by malloc, `torch.empty` by torch's own switch."""
    stock = Load.from_pretrained(path)
    wanted = logits(stock)
    libc = ctypes.CDLL(None)
    libc.mallopt(-6, 1)  # M_PERTURB: memory is filled with 0xfe when it is handed out, with 0x01 when it is freed
    torch.use_deterministic_algorithms(True)
    problems = []
    try:
        for stage in range(4):
            model = hf_dist.from_pretrained(Load, path)
            engine = prepare(model, stage)
            problems += compare(engine, stock)
            if not torch.equal(logits(model), wanted):
                problems.append(f"stage {stage}: logits differ")
    finally:
        torch.use_deterministic_algorithms(False)
        libc.mallopt(-6, 0)
    return problems


def trainer(rank: int, world: int, path: Path) -> list[Any]:
    """The stock call while the arguments live, through the Trainer: nothing is read before prepare, same training."""
    from hf_dist import DistTrainer, DistTrainingArguments

    rows = [{"input_ids": torch.arange(i + 1, i + 9), "labels": torch.arange(i + 1, i + 9)} for i in range(24)]
    results, problems = [], []
    for lazy in (True, False):
        arguments = DistTrainingArguments(
            str(path.parent / "out"), dist_config={"zero_optimization": {"stage": 3}, "hf_dist": {"lazy_load": lazy}},
            per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, seed=3,
        )  # fmt: skip
        before = bytes_read()
        model = Load.from_pretrained(path)
        run = DistTrainer(model=model, args=arguments, train_dataset=rows)
        if bool(lazy_sources(model)) != lazy or bytes_read() != before:
            problems.append("something was read before prepare")
        run.train()
        if lazy and bytes_read() - before > 0.6 * sum(p.nbytes for p in model.parameters()) + 4096:
            problems.append(f"{bytes_read() - before} bytes read")
        state = run.accelerator.get_state_dict(model)
        losses = [x["loss"] for x in run.state.log_history if "loss" in x]
        results += [losses, {k: v.clone() for k, v in state.items()}]
        del arguments, model, run  # or the next model would still be streamed
        gc.collect()
    if results[0] != results[2] or len(results[0]) != 3:
        problems.append(f"losses {results[0]} and {results[2]}")
    if rank == 0:
        problems += [name for name, value in results[1].items() if not torch.equal(value, results[3][name])]
    return problems


def run(rank: int, world: int, names: list[str], path: Path) -> dict[str, list[Any]]:
    """Problems by job, where there are any."""
    found = {name: globals()[name](rank, world, path) for name in names}
    return {name: problems for name, problems in found.items() if problems}
