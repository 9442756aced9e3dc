"""What a checkpoint costs: a script, not a test.

    OMP_NUM_THREADS=1 python -m tests.checkpoint.bench_save --folder /some/disk --reps 5

Two ranks (gloo) train a 124 M parameter Llama for one step with hf_dist (stage 3), with FSDP2 and, where it is installed,
with DeepSpeed (stage 3), all in one process per rank; then each saves and loads in turn, several rounds, medians in the end.

    memcpy           one copy of the rank's fp32 master weights and Adam state into reused host buffers
    hf_dist          stall = total: HF weights and training state, checked, sealed, renamed
    hf_dist no digests    no file is added up as it is written, nor verified as it is loaded
    hf_dist async    stall: how long training stands still; total: until the checkpoint has its name
    FSDP2 DCP        `torch.distributed.checkpoint.save` of model and optimizer (no HF weights)
    DeepSpeed        `save_checkpoint` (no HF weights; nothing is flushed to the disk)

"on disk" adds an `os.sync()` after the save, so that nobody gains from bytes that still wait in memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_ranks

Save = Callable[[Path], float]
"""Writes below a path; returns for how long training stood still."""
Row = tuple[str, Save, Callable[[], None], Callable[[Path], None]]
"""Name, save (returns the stall), wait for the end, load."""


def build_model(size: str, dtype: torch.dtype) -> Any:
    """An untied HF Llama with 124 M parameters (or a tiny one), equal on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    if size == "tiny":
        shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=25600, max_position_embeddings=256, tie_word_embeddings=False, **shape)
    return LlamaForCausalLM(config).to(dtype)


def batch() -> dict[str, torch.Tensor]:
    """Two short rows: the step only has to make optimizer state."""
    ids = torch.arange(64).view(2, 32) + dist.get_rank()
    return {"input_ids": ids, "labels": ids}


def hf_dist_rows(size: str, dtype: torch.dtype) -> list[Row]:
    """The engine of this repository, saving in place and in the background."""
    import hf_dist
    from hf_dist.checkpoint import folder
    from hf_dist.checkpoint.file_sums import FileSums

    model = build_model(size, dtype)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    engine.backward(engine.model(**batch()).loss)
    engine.step()
    state = engine.fragments.optimizer.state
    tensors = [f.group.source for f in engine.fragments.fragments if f.index == 0]
    tensors += [v for s in state.values() for v in s.values() if v.dim()]
    host = [torch.zeros_like(t) for t in tensors]

    def memcpy(_: Path) -> float:
        start = time.perf_counter()
        for into, value in zip(host, tensors, strict=True):
            into.copy_(value)
        return time.perf_counter() - start

    def save(in_background: bool) -> Save:
        def act(path: Path) -> float:
            engine.writer.in_background = in_background
            start = time.perf_counter()
            engine.save_checkpoint(path)
            return time.perf_counter() - start

        return act

    def nothing(*_: Any) -> None: ...

    def without_digests(path: Path) -> float:
        """Nothing is added up while files are written, and the manifest has no digests."""
        add, own = FileSums.add, folder.digest_of
        FileSums.add = lambda self, name, offset, data: None  # type: ignore[method-assign]
        folder.digest_of = lambda path: ""
        try:
            return save(False)(path)
        finally:
            FileSums.add, folder.digest_of = add, own  # type: ignore[method-assign]

    def unverified(path: Path) -> None:
        object.__setattr__(engine.config.checkpoint, "verify", False)
        engine.load_checkpoint(path)
        object.__setattr__(engine.config.checkpoint, "verify", True)

    return [
        ("memcpy", memcpy, nothing, nothing),
        ("hf_dist", save(False), nothing, lambda path: engine.load_checkpoint(path) and None),
        ("hf_dist no digests", without_digests, nothing, unverified),
        ("hf_dist async", save(True), engine.writer.wait, nothing),
    ]


def fsdp2_row(size: str, dtype: torch.dtype) -> Row:
    """FSDP2 with fp32 parameters and bf16 computation, saved by torch's DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(size, torch.float32)
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model(**batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Any]:
        weights, optim = get_state_dict(model, optimizer)
        return {"model": weights, "optim": optim}

    def save(path: Path) -> float:
        start = time.perf_counter()
        dcp.save(state(), checkpoint_id=path)
        return time.perf_counter() - start

    def load(path: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    return "FSDP2 DCP", save, lambda: None, load


def deepspeed_row(size: str, dtype: torch.dtype) -> Row | None:
    """DeepSpeed's stage 3; None where it is not installed."""
    try:
        import deepspeed
    except ImportError:
        return None
    model = build_model(size, torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(**batch()).loss)
    engine.step()

    def save(path: Path) -> float:
        start = time.perf_counter()
        engine.save_checkpoint(str(path), tag="t")
        return time.perf_counter() - start

    return "DeepSpeed", save, lambda: None, lambda path: engine.load_checkpoint(str(path), tag="t") and None


def measure(row: Row, root: Path) -> dict[str, float]:
    """One save and one load. Collective; times are those of the slowest rank."""
    _, save, wait, load = row
    path = root / "checkpoint-1"
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    stall = save(path)
    wait()
    dist.barrier()
    total = time.perf_counter() - start
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    on_disk = time.perf_counter() - start
    nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    dist.barrier()
    start = time.perf_counter()
    load(path)
    dist.barrier()
    times = torch.tensor([stall, total, on_disk, time.perf_counter() - start])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shutil.rmtree(root)
        root.mkdir()
    dist.barrier()
    return dict(zip(("stall", "total", "on disk", "load"), times.tolist(), strict=True)) | {"MB": nbytes / 1e6}


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rows, round after round. Collective."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    rows = hf_dist_rows(options.size, dtype)
    rows += [row for row in (fsdp2_row(options.size, dtype), deepspeed_row(options.size, dtype)) if row is not None]
    rows = [row for row in rows if not options.rows or row[0] in options.rows.split(",")]
    found: dict[str, list[dict[str, float]]] = {row[0]: [] for row in rows}
    for number in range(options.reps + 1):
        # Another order each round: what a row leaves behind in the disk's queue, its successor pays.
        first = number % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            result = measure(row, options.folder)
            if number:  # the first round makes buffers and files
                found[row[0]].append(result)
    return found


def main() -> None:
    """Run and print medians (smallest to largest in brackets)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="an empty folder is made here, and removed at the end"
    )
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--size", default="124M", choices=["124M", "tiny"])
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of hf_dist's model, and so of the HF weights on disk"
    )
    parser.add_argument("--rows", default="", help="names of rows, with commas; all by default")
    options = parser.parse_args()
    options.folder = options.folder / f"bench_save-{os.getpid()}"
    options.folder.mkdir(parents=True)
    try:
        found = run_ranks(run, 2, (options,), timeout=1800)[0]
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    print(f"{'seconds':14}" + "".join(f"{key:>22}" for key in ("stall", "total", "on disk", "load")) + f"{'MB':>9}")
    for name, results in found.items():
        cells = ""
        for key in ("stall", "total", "on disk", "load"):
            values = [r[key] for r in results]
            cells += f"{f'{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})':>22}"
        print(f"{name:14}{cells}{results[0]['MB']:9.0f}")


if __name__ == "__main__":
    main()
