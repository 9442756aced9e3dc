"""What the plan says of a job of 64 ranks, against one rank of it under the fake process group."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from hf_dist.format_bytes import size_text
from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.scale import mixed
from tests.scale.engines import Case, config_of
from tests.scale.measure import measure
from tests.scale.world import forget_launcher

WORLD = 64
LAST = WORLD - 1
# The embedding is large enough to be a unit of its own.
SMALL = Case(width=64, inner=224, layers=2, heads=4, kv_heads=1, vocabulary=1 << 14, seq=32)
WINDOW, BLOCKS = (3, 4) if FULL_GRID else (2, 2)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (0, config_of(0)),
    "stage1-accumulated": (LAST, config_of(1, gradient_accumulation_steps=3)),
    "stage2-accumulated": (0, config_of(2, gradient_accumulation_steps=3)),
    "stage3": (0, config_of(3)),
    "stage3-last-rank": (LAST, config_of(3)),
    "stage3-accumulated-bf16-wire": (0, config_of(3, gradient_accumulation_steps=2, communication_data_type="bf16")),
    "stage2-reduced-once": (
        LAST,
        config_of(2, gradient_accumulation_steps=WINDOW, hf_dist={"reduce_once_per_window": True}),
    ),
    "stage3-reduced-once": (0, config_of(3, gradient_accumulation_steps=3, hf_dist={"reduce_once_per_window": True})),
    "hsdp-accumulated": (LAST, config_of(3, gradient_accumulation_steps=2)),
    **{
        f"over-stage{stage}": (0, config_of(stage, gradient_accumulation_steps=2, hf_dist={"optimizer_over": "all"}))
        for stage in (1, 2, 3)
    },
}
"""Rank and config."""
for name in ("hsdp-accumulated", "over-stage1", "over-stage2", "over-stage3"):
    CASES[name][1]["zero_optimization"]["mics_shard_size"] = 8
# One whose weights are whole, one that shards them, one that copies the shards; `planning/test_mixed_traffic.py` has more.
CASES = some_of(CASES, "stage2-reduced-once", "stage3", "hsdp-accumulated", "over-stage3")

# Heads wider and narrower than the rest, so that the peak is at the loss, at the head or in the blocks; and blocks whose
# gradient finds no room beside the head's.
PEAKS = {
    "loss": Case(2048, 7168, BLOCKS, 16, 4, 128256, seq=1024),
    "head": Case(2048, 7168, BLOCKS, 16, 4, 128256, seq=64),
    "blocks": Case(2048, 7168, BLOCKS, 16, 4, 32000, seq=4096),
    "not checkpointed": Case(2048, 7168, BLOCKS, 16, 4, 32000, seq=4096, checkpointing=False),
    "no room": Case(8192, 28672, BLOCKS, 64, 8, 128256, seq=4096),
    "no room, not checkpointed": Case(8192, 28672, BLOCKS, 64, 8, 128256, seq=1024, checkpointing=False),
}


def measure_all(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Every case, one rank of 64 each."""
    forget_launcher()
    return {
        name: measure("hf_dist", SMALL, WORLD, config, rank=place, steps=2) for name, (place, config) in CASES.items()
    }


LOSSES: dict[str, Any] = {"chunks": None, "as it is": False}
# By default the two that are about the ends, and not the many chunks of a long row; `STAGED` has peaks in the blocks.
PEAKED = (
    [(name, loss) for name in PEAKS for loss in LOSSES] if FULL_GRID else [("loss", "as it is"), ("head", "chunks")]
)


def measure_peaks(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Every shape under stage 3."""
    forget_launcher()
    return {
        (name, loss): measure("hf_dist", case, WORLD, config_of(3, hf_dist={"tiled_loss": value}), steps=2)
        for name, loss in PEAKED
        for case, value in [(PEAKS[name], LOSSES[loss])]
    }


def measure_parts(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Everything of these names."""
    parts: dict[str, Any] = {"cases": measure_all, "peaks": measure_peaks, "mixtures": measure_mixed}
    return {name: parts[name](rank, world) for name in names}


@functools.cache
def found_by(*names: str) -> dict[str, Any]:
    """In a process of its own: tensors without elements make wrong memories (probes, caches)."""
    return run_ranks(measure_parts, 1, (names,))[0]


def found(name: str) -> Any:
    """One of the parts. What starts once is dearer than a case, so few cases share a process."""
    return found_by(name)[name] if FULL_GRID else found_by("cases", "peaks", "mixtures")[name]


def peaks() -> dict[tuple[str, str], dict[str, Any]]:
    return found("peaks")


def measured() -> dict[str, dict[str, Any]]:
    return found("cases")


cases = pytest.mark.parametrize("case", CASES)


@cases
def test_collectives_of_a_step_equal_the_plan(case: str) -> None:
    got = measured()[case]
    assert got["traffic"] == got["planned_traffic"]  # what torch was asked for
    assert got["counted"] == got["planned_traffic"]  # what the counter says


@cases
def test_bytes_at_rest_equal_the_plan(case: str) -> None:
    got = measured()[case]
    assert got["resident_said"] == got["planned_resident"]
    # All tensors that are alive, but for buffers and the batch: nothing else is kept than a few numbers.
    assert 0 <= got["resident"] - got["planned_resident"] <= 64


def test_the_report_of_eight_machines_tells_links_apart() -> None:
    (line,) = (line for line in measured()["stage3"]["report"] if "sent along shard" in line)
    assert line.count(" 0 B ") == 0 and " inside a machine, " in line
    sent = sum(nbytes for _, nbytes in measured()["stage3"]["planned_traffic"].values())
    assert size_text(sent // 8) in line  # a ring leaves each machine once


@pytest.mark.parametrize(("case", "loss"), PEAKED)
def test_the_peak_is_planned(case: str, loss: str) -> None:
    got = peaks()[case, loss]
    assert got["peak"] == pytest.approx(got["planned_peak"], rel=0.04)


JOBS = {
    "tp": mixed.Job("", 64, {"tp": 4}, seq=64, microbatches=2),
    "cp": mixed.Job("", 64, {"cp": 4}, seq=64),
    "tp-cp-copies": mixed.Job("", 512, {"tp": 2, "cp": 2, "dp_shard": 8}, seq=64),
    "experts": mixed.Job("experts", 64, {"ep": 4}, seq=64),
    "experts, long rows": mixed.Job("experts", 64, {"ep": 8, "cp": 2}, seq=4096),
}
JOBS = some_of(JOBS, "experts, long rows")  # `planning/test_mixed_traffic.py` has every axis, but no peaks
# Rows long enough that activations count, and heads that do.
LONG = Case(512, 1792, 4, 8, 2, 4000, checkpointing=False)
STAGED = {
    "tp-pp": mixed.Job("", 32, {"tp": 2, "pp": 4}, stage=1, seq=4096, microbatches=WINDOW + 1),
    "tp-pp-cp": mixed.Job("", 4096, {"tp": 2, "pp": 2, "cp": 2}, stage=3, seq=4096, microbatches=2),
    "gpipe": mixed.Job("", 8, {"pp": 2}, stage=1, seq=4096, microbatches=3, more={"pipeline.schedule": "gpipe"}),
    "interleaved": mixed.Job(
        "", 8, {"pp": 2}, stage=2, seq=4096, microbatches=4,
        more={"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2},
    ),
    "zb_h1": mixed.Job(
        "", 8, {"pp": 2}, stage=1, seq=4096, microbatches=3,
        more={"pipeline.schedule": "zb_h1", "activation_checkpointing.every_n_layers": None},
    ),
}  # fmt: skip
PLACES = [(name, place) for name, job in STAGED.items() for place in range(job.sizes["pp"])]
if not FULL_GRID:  # one of the middle, that has the other axes, too
    PLACES = [("tp-pp", 2)]
MIXED = Case(256, 512, 4, 8, 4, 1024, checkpointing=False)


def experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=1024)
    sizes = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=BLOCKS)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**heads, **sizes, num_experts=8, num_experts_per_tok=2, use_cache=False)
    ).train()


def _place(job: str, place: int) -> str:
    return f"{job}, stage {place}"


def measure_mixed(rank: int, world: int) -> dict[str, tuple[list[str], float]]:
    """What differs from the plan, and the peak over the planned one, job by job."""
    forget_launcher()
    differs = {}
    jobs = {name: (job, experts if job.model else MIXED.llama) for name, job in JOBS.items()}
    jobs |= {_place(*key): (replace(STAGED[key[0]], place=key[1]), LONG.llama) for key in PLACES}
    for name, (job, make) in jobs.items():
        got, plan = mixed.measure(job, make), mixed.planned(job, make)
        differs[name] = mixed.differences(job, got, plan), got["peak"] / plan["peak"]
    return differs


def mixtures() -> dict[str, tuple[list[str], float]]:
    return found("mixtures")


@pytest.mark.parametrize("job", JOBS)
def test_mixtures_hold_and_send_what_the_plan_says(job: str) -> None:
    assert mixtures()[job][0] == []


@pytest.mark.parametrize("job", [job for job in JOBS if job.startswith("experts, ")])
def test_the_rows_of_spread_experts_are_in_the_planned_peak(job: str) -> None:
    """Without the buffers of the exchange, 1.31 to 1.39. Gradients of a block's activations are two of its largest tensors."""
    assert mixtures()[job][1] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("job", "place"), PLACES)
def test_every_stage_holds_and_peaks_at_what_is_planned_for_it(job: str, place: int) -> None:
    """With split matrices also: what a recomputed block crosses must not keep its graph until the next forward."""
    wrong, peak = mixtures()[_place(job, place)]
    assert wrong == []
    assert peak == pytest.approx(1, rel=0.05)
