"""`hf-dist check` of layouts in which one axis is broken on purpose: the first tensor that differs, and the axis to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import axes_of, load_config
from hf_dist.tools.check import prepare, prove
from hf_dist.tools.check.blame import Blamed, to_blame
from hf_dist.tools.check.compare import compare
from hf_dist.tools.check.job import Job
from hf_dist.tools.check.parts import ALONE, ONE_RANK, WITHOUT, Part, alone_parts, one_rank, parts_without_one
from tests.covering import some_of
from tests.tools.proofs import asked_for, start_fork_server

EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
STAGES = {"pipeline": {"stages": 2}}
SLICES = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCES = {"sequence_parallel_size": 2}
FIRST, EXPERT = "model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """The section of ZeRO."""
    return {"zero_optimization": {"stage": stage, **more}}


BROKEN: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a route's weight, ep x tp": ("RoutesMoe", {**EXPERTS, **SLICES, **zero(1)}, FIRST, "ep 2"),
    "an expert's rows, ep x pp": ("RowsMoe", {**EXPERTS, **STAGES, **zero(1)}, FIRST, "ep 2"),
    "a route's weight, ep x cp": ("RoutesMoe", {**EXPERTS, **SEQUENCES, **zero(2)}, FIRST, "ep 2"),
    "experts of several ranks, ep x dp": ("SharedExpertsMoe", {**EXPERTS, **zero(3)}, EXPERT, "ep 2"),
    "data ranks, ep x dp": ("ShardsMoe", {**EXPERTS, **zero(1)}, FIRST, "ZeRO on 4 data ranks"),
    "parts of a sequence, cp x ep": ("SequencesMoe", {**EXPERTS, **SEQUENCES}, FIRST, "cp 2"),
    "a gradient between stages, pp x dp": ("HandedBackLlama", {**STAGES, **zero(3)}, FIRST, "pp 2"),
    "a loss of slices, tp x dp": ("SlicesLlama", {**SLICES, **zero(1)}, FIRST, "tp 2"),
    "copies, dp_replicate x dp": ("ReplicasLlama", zero(3, mics_shard_size=2), FIRST, "dp_replicate 2"),
}
"""Fault and mixture -> class of `tests/workers/broken.py`, layout on four ranks, first tensor, axis to blame."""


FEW = ("a gradient between stages, pp x dp",)
"""The parts of other mixtures, and who is blamed by them, are without processes, below."""


@pytest.mark.parametrize("name", some_of(BROKEN, *FEW))
def test_the_broken_axis_is_named(name: str, tmp_path: Path) -> None:
    start_fork_server()
    cls, layout, first, blamed = BROKEN[name]
    family = "qwen3_moe" if cls.endswith("Moe") else "llama"
    config = {**layout, "gradient_clipping": 0.0, "gradient_accumulation_steps": 2}  # a clip spreads a fault to all
    options = {"layers": 2, "steps": 1, "class_name": f"tests.workers.broken:{cls}"}
    proof = prove(prepare(asked_for(tmp_path, family, config, world=4, **options), tmp_path), 4)
    assert not proof.equal
    assert (proof.differs[0], proof.to_blame) == (first, blamed), proof.blamed
    assert not any(part.error for part in proof.blamed), proof.blamed


# ---- without processes


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_without_copies_do_not_shard_the_optimizer_over_them(stage: int) -> None:
    layout = {**STAGES, **zero(stage, mics_shard_size=2), "hf_dist": {"optimizer_over": "all"}}
    whole = job({**layout, "gradient_accumulation_steps": 2}, data_ranks=4, accumulation=2)
    for part in (*alone_parts(whole), *parts_without_one(whole), one_rank(whole)):
        config = load_config(part.job.layout)
        copies = axes_of(config, part.world).size("dp_replicate")
        assert (config.hf_dist.optimizer_over == "all") == (copies > 1), part.named


def job(layout: dict[str, Any], data_ranks: int, accumulation: int) -> Job:
    """Of two steps."""
    return Job("", "X", layout, {}, "AdamW", {"lr": 1e-3}, 2, data_ranks, accumulation)


def tried(whole: Job) -> dict[str, Part]:
    """Every part, by what is said of it."""
    parts = [*alone_parts(whole), *parts_without_one(whole), one_rank(whole)]
    for part in parts:
        axes = axes_of(load_config(part.job.layout), part.world)
        assert axes.size("data") == part.job.data_ranks
        assert part.job.window == whole.window == part.job.data_ranks * part.job.layout["gradient_accumulation_steps"]
    return {Blamed(part.axis, part.named, part.tried, True).what: part for part in parts}


def test_parts_of_a_layout_have_the_batches_of_the_whole() -> None:
    layout = {**STAGES, **SEQUENCES, **zero(3, mics_shard_size=4), "gradient_accumulation_steps": 2}
    layout["expert_parallel"] = {"enabled": True, "autoep_size": 4}
    found = tried(job(layout, data_ranks=4, accumulation=2))
    assert {name: part.world for name, part in found.items()} == {
        "pp 2 alone": 2,
        "cp 2 alone": 2,
        "ep 4 alone": 4,
        "dp_replicate 2 alone": 2,
        "ZeRO on 2 data ranks alone": 2,
        "without pp 2": 8,
        "without cp 2": 16,
        "without ep 4": 16,
        "without dp_replicate 2": 8,
        "one rank": 1,
    }, "without the ranks of ZeRO there is no room for the experts"
    assert not alone_parts(job(zero(3), 1, 1))


def test_experts_alone_have_all_ranks_that_share_them() -> None:
    found = tried(job({**EXPERTS, **zero(3)}, data_ranks=4, accumulation=1))
    assert found["ep 2 alone"].world == 4
    assert found["ep 2 alone"].on == ("ZeRO",)
    assert "zero_optimization" not in found["ep 2 alone"].job.layout


def test_experts_on_the_ranks_of_a_sequence_stay_there_where_there_are_too_few_rows() -> None:
    whole = job({**EXPERTS, **SEQUENCES, "gradient_accumulation_steps": 1}, data_ranks=1, accumulation=1)
    found = tried(whole)
    assert found["ep 2 alone"].job == whole
    assert found["ep 2 alone"].on == ("cp",)
    assert sorted(found) == ["cp 2 alone", "ep 2 alone", "one rank", "without ep 2"]


@pytest.mark.parametrize("shard", [1, 2, 8])
def test_copies_are_an_axis_whatever_their_shards_are(shard: int) -> None:
    found = tried(job({"sequence_parallel_size": 4, **zero(3, mics_shard_size=shard)}, data_ranks=2, accumulation=1))
    assert ("dp_replicate 2 alone" in found) == (shard < 8)


def blamed(outcomes: dict[str, bool]) -> list[Blamed]:
    """Of sentences, as `Blamed.what` says them."""
    found = []
    for what, equal in outcomes.items():
        named = what.removesuffix(" alone").removeprefix("without ")
        kind = ONE_RANK if what == ONE_RANK else ALONE if what.endswith(" alone") else WITHOUT
        on = {"ep": ("ZeRO",), "cp": ("ZeRO",)}.get(named.split()[0], ())
        found.append(Blamed(named.split()[0], named, kind, equal, on=on))
    return found


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"pp 2 alone": True, "tp 2 alone": False}, "tp 2"),
        (
            {"pp 2 alone": True, "tp 2 alone": True, "cp 2 alone": True, "without pp 2": False, "without cp 2": True},
            "cp 2",
        ),
        ({"pp 2 alone": False, "tp 2 alone": False, "one rank": True}, "pp 2, tp 2"),
        ({"pp 2 alone": False, "tp 2 alone": False, "one rank": False}, "no axis: one rank of hf_dist differs as well"),
        ({"pp 2 alone": True, "tp 2 alone": True}, "no axis by itself: only all of them together differ"),
        ({"ep 2 alone": False, "cp 2 alone": False, "ZeRO on 4 data ranks alone": True}, "ep 2, cp 2"),
        ({"ep 2 alone": False, "tp 2 alone": True, "ZeRO on 4 data ranks alone": False}, "ZeRO on 4 data ranks"),
        ({}, ""),
    ],
)
def test_who_is_blamed(outcomes: dict[str, bool], expected: str) -> None:
    assert to_blame(blamed(outcomes)) == expected


def test_the_first_tensor_is_the_first_of_the_model_where_ranks_hold_every_other_layer() -> None:
    names = ["layers.0", "layers.1", "layers.2", "layers.3"]
    one = {
        "losses": [4.0],
        "norms": [1.0],
        "next": {"going on": (3.0, 0.1), "resumed": (3.0, 0.1)},
        "reloaded": dict.fromkeys(names, 0.0),
        "skipped": 0,
        "evaluation": 2.0,
    }
    ranks = [{**one, "differences": [dict.fromkeys(held, 1.0)]} for held in (names[2::2], names[1::2])]
    alone = {"plain": {"losses": [4.0, 3.0], "norms": [1.0, 0.1], "evaluation": 2.0}}
    single = Job("", "X", {}, {}, "AdamW", {}, 1, 1, 1)
    assert compare(single, alone, ranks).differs == names[1:]
