"""Layouts that others have published with their throughput, among those that `hf-dist plan --gpus` finds for the same job.

    python -m tests.published [--only NAME ...] [--between 25]

One line per job: the first of the search, the place of the published sizes among the different ones that were found, and how
much longer their step is taken to be than the first's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.estimate.found import Found
from hf_dist.estimate.hardware import Hardware
from hf_dist.estimate.layouts import Wanted
from hf_dist.estimate.memory_plan import Limits
from hf_dist.estimate.overhead import estimated
from hf_dist.estimate.search import Search
from tests.scale import mixed

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
AUTOMODEL = "NeMo AutoModel 26.04, docs/performance-summary.md, DGX-H100"
CORE = "Megatron-Core, megatron/core/transformer/moe/README.md"
BRIDGE = "Megatron-Bridge 25.11, docs/performance-summary.md"
FP8 = Hardware(flops=800e12)
"""Jobs in FP8: the products take about half the time, everything else is as in bf16."""
GB200 = Hardware(flops=1100e12, memory=6.5e12, inside=700e9, between=50e9, ranks_per_machine=64)
"""The same share of the data sheet as the speeds taken for an H100."""


@dataclass(frozen=True)
class Published:
    """A job and the sizes that it was run with."""

    model: str
    ranks: int
    rows: int
    seq: int
    memory: float
    """GB of a GPU."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of axes with more than one rank, but for the data ranks."""
    speed: str = ""
    source: str = TITAN
    hardware: Hardware = field(default_factory=Hardware)


JOBS = {
    "8b-8": Published("8b", 8, 16, 8192, 96, {}, "5762"),
    "8b-128": Published("8b", 128, 256, 8192, 96, {}, "5605"),
    "8b-8-long": Published("8b", 8, 1, 262144, 96, {"cp": 8}, "548 (FP8)", TITAN, FP8),
    "70b-256": Published("70b", 256, 512, 8192, 96, {"tp": 8}, "829 (FP8)", TITAN, FP8),
    "405b-512": Published("405b", 512, 256, 8192, 96, {"tp": 8, "pp": 8}, "128 (FP8)", TITAN, FP8),
    "405b-1024-bridge": Published(
        "405b", 1024, 512, 8192, 80, {"tp": 8, "pp": 8, "cp": 2}, "292 (FP8)", f"{BRIDGE}, DGX-H100", FP8
    ),
    "8b-8-bridge": Published("8b", 8, 128, 8192, 80, {}, "14451 (FP8)", f"{BRIDGE}, DGX-H100", FP8),
    "70b-64-bridge": Published("70b", 64, 128, 8192, 80, {"tp": 4, "pp": 8}, "1602 (FP8)", f"{BRIDGE}, DGX-H100", FP8),
    "qwen3-30b-16": Published(
        "qwen3-30b", 16, 512, 4096, 80, {"pp": 2, "ep": 8}, "5275 (FP8)", f"{BRIDGE}, DGX-H100", FP8
    ),
    # The page leaves out the number of rows.
    "qwen3-235b-256": Published(
        "qwen3-235b", 256, 2048, 4096, 80, {"tp": 2, "pp": 8, "ep": 32}, "1575 (FP8)", f"{BRIDGE}, DGX-H100", FP8
    ),
    "deepseek-v3-256": Published(
        "deepseek-v3", 256, 4096, 4096, 186, {"pp": 4, "ep": 64}, "3139", f"{BRIDGE}, DGX-GB200", GB200
    ),
    "70b-64-auto": Published("70b", 64, 128, 8192, 80, {"cp": 2}, "867", AUTOMODEL),
    "qwen3-30b-8-auto": Published("qwen3-30b", 8, 512, 4096, 80, {"ep": 8}, "12040", AUTOMODEL),
    "deepseek-v3-256-auto": Published("deepseek-v3", 256, 512, 4096, 80, {"pp": 4, "ep": 64}, "1002", AUTOMODEL),
    # The page names throughput of the first only: 468 TFLOP/s.
    "mixtral-8x7b-64": Published("mixtral-8x7b", 64, 256, 4096, 80, {"pp": 4, "ep": 8}, "468 TFLOP/s", CORE),
    "mixtral-8x22b-128": Published("mixtral-8x22b", 128, 256, 4096, 80, {"tp": 4, "pp": 8, "ep": 2}, "not told", CORE),
}
AXES = ("pp", "tp", "cp", "ep")


def model_of(name: str) -> Any:
    """Without memory, and without a way of checkpointing of its own."""
    with torch.device("meta"):
        return mixed.model_of(name)


def search_of(job: Published, between: float | None = None) -> Search:
    """As the command makes it; `between`: GB/s of a rank to other machines, if others are tried."""
    hardware = job.hardware if between is None else replace(job.hardware, between=1e9 * between)
    model = model_of(job.model)
    data = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "hf_dist": {"tiled_loss": True}}
    width = model.config.hidden_size
    config = resolve_without_trainer(load_config(data), data_ranks=1, hidden_size=width, on_gpu=True)
    wanted = Wanted(job.ranks, job.rows, job.seq, hardware.ranks_per_machine)
    limits = Limits(round(job.memory * 1e9), None, 8)
    return Search(model, config, wanted, limits, hardware, estimated)


def sizes_of(found: Found) -> tuple[int, ...]:
    """Of the axes that papers name."""
    return tuple(getattr(found.layout, name) for name in AXES)


def line(name: str, job: Published, between: float | None = None) -> str:
    """A row of the table."""
    start = time.time()
    search = search_of(job, between)
    found = search.best(12)
    wanted = {axis: job.sizes.get(axis, 1) for axis in AXES}
    theirs = search.best_with(**wanted)
    first = found[0]
    better = {sizes_of(each) for each in found if theirs is None or each.time.seconds < theirs.time.seconds}
    place = str(len(better - {tuple(wanted.values())}) + 1) if theirs is not None else "does not fit"
    longer = f"{theirs.time.seconds / first.time.seconds:.2f}" if theirs is not None else ""
    named = " ".join(f"{axis} {size}" for axis, size in job.sizes.items()) or "FSDP"
    cells = [name, str(job.ranks), f"{job.rows} x {job.seq}", named, job.speed, first.layout.text]
    cells += [f"{first.speed:.0f}", place, longer, f"{time.time() - start:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=JOBS)
    head = "job | GPUs | rows | published | tokens/s | first of the search | modelled | place | step | search s"
    parser.add_argument("--between", type=float, help="GB/s of a rank to other machines")
    given = parser.parse_args()
    print(f"| {head} |\n|---|--:|---|---|--:|---|--:|--:|--:|--:|")
    for name in given.only:
        print(line(name, JOBS[name], given.between), flush=True)


if __name__ == "__main__":
    main()
