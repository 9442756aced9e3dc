"""Layouts that others have published with their throughput, among those that `hf-dist plan --gpus` finds for the same job.

    python -m tests.published [--only NAME ...] [--between 25] [--constants]

One row per job: the first of the search, the place of the published sizes among the different ones that were found, how much
longer their step is taken to be than the first's, and the tokens per second that the model gives them with the recomputation
and the rows that were published. Below it, what the place hangs on: parts of the step left out of all layouts that were found;
the bytes of published sizes that do not fit; with `--constants` the place if a speed is another, of the same layouts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.format_bytes import size_text
from hf_dist.planning.found import Found
from hf_dist.planning.hardware import Hardware
from hf_dist.planning.layouts import Wanted, layouts
from hf_dist.planning.memory_plan import Limits
from hf_dist.planning.overhead import estimated
from hf_dist.planning.search import Search
from tests.scale import mixed

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
AUTOMODEL = "NeMo AutoModel 26.04, docs/performance-summary.md, DGX-H100"
CORE = "Megatron-Core, megatron/core/transformer/moe/README.md"
BRIDGE = "Megatron-Bridge 25.11, docs/performance-summary.md"
HBM2E = Hardware(memory=1.86e12)
"""torchtitan's H100: 2.4 TB/s, and the same share of the data sheet as of the others' 3.35."""
GB200 = Hardware(flops=1100e12, memory=6.5e12, inside=700e9, between=50e9, ranks_per_machine=64)
"""The same share of the data sheet as the speeds taken for an H100."""
PARTS = ("recomputation", "tp", "cp", "ep", "weights", "bubble")
"""Parts of a step that are left out."""
CONSTANTS = ("flops", "float8", "memory", "inside", "between", "latency")
"""Of `Hardware`: all that the model of time is free to choose."""


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
    ran: dict[str, Any] = field(default_factory=dict)
    """What else is told of the layout: rows of a microbatch, recomputation."""
    fused: bool = True
    """Whether its blocks were compiled, or written in fused kernels."""

    @property
    def fp8(self) -> dict[str, Any]:
        """`hf_dist.fp8`: linear layers multiply in float8, with a scale per tensor; stacked experts and attention in bf16."""
        return {"enabled": True, "recipe": "tensorwise"} if "(FP8)" in self.speed else {}


def _bridge(model: str, ranks: int, rows: int, seq: int, sizes: dict[str, int], speed: str, micro: int) -> Published:
    """On DGX-H100 in FP8. The recipes (`scripts/performance/configs` of 25.11) name no recomputation."""
    ran = {"micro": micro, "recomputed": "nothing"}
    return Published(model, ranks, rows, seq, 80, sizes, f"{speed} (FP8)", f"{BRIDGE}, DGX-H100", ran=ran)


OPS, ALL = {"micro": 2, "recomputed": "selective"}, {"recomputed": "blocks"}
JOBS = {
    "8b-8": Published("8b", 8, 16, 8192, 96, {}, "5762", TITAN, HBM2E, OPS, fused=False),
    "8b-8-compiled": Published("8b", 8, 16, 8192, 96, {}, "6667", TITAN, HBM2E, OPS),
    "8b-8-fp8": Published("8b", 8, 16, 8192, 96, {}, "8532 (FP8)", TITAN, HBM2E, OPS),
    "8b-128": Published("8b", 128, 256, 8192, 96, {}, "5605", TITAN, HBM2E, OPS, fused=False),
    "8b-8-long": Published("8b", 8, 1, 262144, 96, {"cp": 8}, "548 (FP8)", TITAN, HBM2E, ALL),
    # With asynchronous tp 876. Microbatches had 16 rows; the search goes up to 8.
    "70b-256": Published("70b", 256, 512, 8192, 96, {"tp": 8}, "829 (FP8)", TITAN, HBM2E, {**ALL, "micro": 8}),
    "405b-512": Published("405b", 512, 256, 8192, 96, {"tp": 8, "pp": 8}, "128 (FP8)", TITAN, HBM2E, ALL),
    "405b-1024-bridge": _bridge("405b", 1024, 512, 8192, {"tp": 8, "pp": 8, "cp": 2}, "292", 1),
    "8b-8-bridge": _bridge("8b", 8, 128, 8192, {}, "14451", 1),
    "70b-64-bridge": _bridge("70b", 64, 128, 8192, {"tp": 4, "pp": 8}, "1602", 1),
    "qwen3-30b-16": _bridge("qwen3-30b", 16, 512, 4096, {"pp": 2, "ep": 8}, "5275", 2),
    # The page leaves out the number of rows; the recipe has 2048.
    "qwen3-235b-256": _bridge("qwen3-235b", 256, 2048, 4096, {"tp": 2, "pp": 8, "ep": 32}, "1575", 1),
    # The recipe recomputes a projection of attention.
    "deepseek-v3-256": Published(
        "deepseek-v3", 256, 4096, 4096, 186, {"pp": 4, "ep": 64}, "3139", f"{BRIDGE}, DGX-GB200", GB200, {"micro": 1}
    ),
    "70b-64-auto": Published("70b", 64, 128, 8192, 80, {"cp": 2}, "867", AUTOMODEL),
    "qwen3-30b-8-auto": Published(
        "qwen3-30b", 8, 512, 4096, 80, {"ep": 8}, "12040", AUTOMODEL, ran={**ALL, "micro": 4}
    ),
    "deepseek-v3-256-auto": Published(
        "deepseek-v3", 256, 512, 4096, 80, {"pp": 4, "ep": 64}, "1002", AUTOMODEL, ran={**ALL, "micro": 1}
    ),
    # The page names throughput of the first only: 468 TFLOP/s.
    "mixtral-8x7b-64": Published(
        "mixtral-8x7b", 64, 256, 4096, 80, {"pp": 4, "ep": 8}, "468 TFLOP/s", CORE, ran={"micro": 1}
    ),
    "mixtral-8x22b-128": Published(
        "mixtral-8x22b", 128, 256, 4096, 80, {"tp": 4, "pp": 8, "ep": 2}, "not told", CORE, ran={"micro": 1}
    ),
}
AXES = ("pp", "tp", "cp", "ep")
Seconds = Callable[[Found], float]


def model_of(name: str) -> Any:
    """Without memory, and without a way of checkpointing of its own."""
    with torch.device("meta"):
        return mixed.model_of(name)


def search_of(job: Published, between: float | None = None) -> Search:
    """As the command makes it; `between`: GB/s of a rank to other machines, if others are tried.

    Stages and slices are tried with fused kernels too, which the published systems have, and `compile.enabled` has not.
    """
    hardware = job.hardware if between is None else replace(job.hardware, between=1e9 * between)
    model = model_of(job.model)
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    data["hf_dist"] = {"tiled_loss": True, "fp8": job.fp8}
    width = model.config.hidden_size
    config = resolve_without_trainer(load_config(data), data_ranks=1, hidden_size=width, on_gpu=True)
    wanted = Wanted(job.ranks, job.rows, job.seq, hardware.ranks_per_machine)
    limits = Limits(round(job.memory * 1e9), None, 8)
    return Search(model, config, wanted, limits, hardware, estimated, fused=job.fused)


def sizes_of(found: Found) -> tuple[int, ...]:
    """Of the axes that papers name."""
    return tuple(getattr(found.layout, name) for name in AXES)


def without(names: Sequence[str], found: Found) -> float:
    """Seconds of a step without these parts; the bubble is a share of the others."""
    parts = {name: 0.0 if name in names else seconds for name, seconds in found.time.parts.items()}
    if "bubble" not in names:
        busy = sum(parts[name] for name in ("compute", "recomputation", "tp", "cp", "ep"))
        parts["bubble"] = busy * found.time.bubble / (1 - found.time.bubble)
    return sum(parts.values())


@dataclass(frozen=True)
class Placed:
    """What a search found, and the published sizes with the best of the rest."""

    found: list[Found]
    theirs: Found
    hardware: Hardware

    def by(self, seconds: Seconds) -> tuple[int, float]:
        """(place of the published sizes, their step / the first's)."""
        own, mine = seconds(self.theirs), sizes_of(self.theirs)
        others = [(seconds(each), sizes_of(each)) for each in self.found]
        better = {sizes for taken, sizes in others if taken < own} - {mine}
        return len(better) + 1, own / min(own, *(taken for taken, _ in others))

    def slowed(self, found: Found) -> float:
        """Seconds, if gathers and reductions of weights slowed what hides them: each byte is read here and written there."""
        hidden = sum(found.time.sent.get(axis, 0) for axis in ("shard", "edp", "dp_replicate"))
        return found.time.seconds + 2 * hidden / self.hardware.memory

    def reasons(self) -> Iterator[str]:
        """Parts in which it loses to the first, and its place without: one by one, then more of them until it is third."""
        first = min(self.found, key=lambda each: each.time.seconds)
        lost = [name for name, _ in self.theirs.loses(first) if name in PARTS]
        seconds = ", ".join(f"{name} {more:.2f}" for name, more in self.theirs.loses(first))
        yield f"of {self.theirs.time.seconds:.2f} s; loses to {first.layout.text} ({first.time.seconds:.2f}) by {seconds}"
        tried = [*((name,) for name in lost), *(tuple(lost[:n]) for n in range(2, len(lost) + 1))]
        for names in tried:
            place, longer = self.by(lambda each, names=names: without(names, each))  # type: ignore[misc]
            yield f"without {' and '.join(names)}: place {place}, {longer:.2f}"
            if len(names) > 1 and place <= 3:
                break
        more, less = self.theirs.time.seconds - first.time.seconds, first.time.hidden - self.theirs.time.hidden
        if less > more:
            yield f"as fast as the first if {more / less:.0%} of what hides behind computing showed ({first.time.hidden:.2f} s)"
        place, longer = self.by(self.slowed)
        yield f"if hidden sends took the time of their memory traffic: place {place}, {longer:.2f}"


def wanted_sizes(search: Search, job: Published) -> dict[str, int]:
    """The published sizes; `ep` is the largest that can be, where experts are spread over more ranks than data ranks."""
    sizes = {axis: job.sizes.get(axis, 1) for axis in AXES}
    possible = {tuple(getattr(each, axis) for axis in AXES) for each in layouts(search.shape, search.wanted)}
    while tuple(sizes.values()) not in possible and sizes["ep"] > 1:
        sizes["ep"] //= 2
    return sizes


def report(name: str, job: Published, between: float | None = None, *, constants: bool = False) -> Iterator[str]:
    """The row of the table, and lines below it."""
    start = time.time()
    search = search_of(job, between)
    wanted = wanted_sizes(search, job)
    found = search.best(12)
    theirs, ran = search.best_with(**wanted), search.best_with(**wanted, **job.ran)
    took = time.time() - start
    placed = None if theirs is None else Placed(found, theirs, search.hardware)
    place, longer = (0, 0.0) if placed is None else placed.by(lambda each: each.time.seconds)
    named = " ".join(f"{axis} {size}" for axis, size in job.sizes.items()) or "FSDP"
    cells = [name, str(job.ranks), f"{job.rows} x {job.seq}", named, job.speed]
    cells += [f"{ran.speed:.0f}" if ran else "no room", found[0].layout.text, f"{found[0].speed:.0f}"]
    cells += [str(place) if placed else "no room", f"{longer:.2f}" if placed else "", f"{took:.0f}"]
    yield f"| {' | '.join(cells)} |"
    if wanted["ep"] != job.sizes.get("ep", 1):
        yield f"    ep {wanted['ep']} instead of {job.sizes['ep']}"
    for each in (found[0], *([theirs] if theirs else ())):
        layout = each.layout
        more = f"{layout.micro} x {layout.microbatches}, {layout.virtual} parts, again: {layout.recomputed}"
        yield f"    {layout.text}, {more}: " + ", ".join(f"{k} {v:.2f}" for k, v in each.time.parts.items() if v)
    if placed is not None and place > 1:
        yield from (f"    {reason}" for reason in placed.reasons())
    if ran is None and (smallest := search.smallest_with(**{**wanted, **job.ran})) is not None:
        yield f"    {smallest.layout.text} as it ran: {bytes_of(smallest)}"
    if placed is None and (smallest := search.smallest_with(**wanted)) is not None:
        yield f"    {smallest.layout.text}: {bytes_of(smallest)}"
    if constants and placed is not None:
        yield f"    constants: {'; '.join(changed(search, placed))}"


def bytes_of(found: Found) -> str:
    """The plan, part by part: at rest, at the fullest moment of backward, beside tensors."""
    plan = found.plan
    left_out = ("gradients", "temporary memory in backward", "logits and loss")
    rows = {what: nbytes for what, nbytes, _ in plan.rows() if what not in left_out}
    rows["beside tensors"] = plan.beside
    rows["gradients in flight, or the loss"] = max(0, plan.device_need - sum(rows.values()))
    return ", ".join(f"{what} {size_text(n)}" for what, n in rows.items() if n) + f": {size_text(plan.device_need)}"


def changed(search: Search, placed: Placed) -> Iterator[str]:
    """The place, and the step by the first's, if a constant is a fifth less or more; of the same layouts."""
    for name, factor in itertools.product(CONSTANTS, (0.8, 1.2)):
        other = replace(search.hardware, **{name: factor * getattr(search.hardware, name)})
        found = [search.timed_by(other, each) for each in placed.found]
        again = Placed(found, search.timed_by(other, placed.theirs), other)
        place, longer = again.by(lambda each: each.time.seconds)
        yield f"{name} x {factor} {place} ({longer:.2f})"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--between", type=float, help="GB/s of a rank to other machines")
    parser.add_argument("--constants", action="store_true", help="places if a speed of the model is another")
    head = (
        "job | GPUs | rows | published | tokens/s | modelled | first of the search | tokens/s | place | step | search s"
    )
    given = parser.parse_args()
    print(f"| {head} |\n|---|--:|---|---|--:|--:|---|--:|--:|--:|--:|")
    for name in given.only:
        for text in report(name, JOBS[name], given.between, constants=given.constants):
            print(text, flush=True)


if __name__ == "__main__":
    main()
