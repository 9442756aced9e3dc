"""Encoded messages: the numbers of one process that applies the same function, bit for bit; bytes by the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.tensors.codecs import codec_of
from tests.covering import FULL_GRID, PAIRS, cells
from tests.harness import run_ranks
from tests.sharding.wires import jobs
from tests.sharding.wires.reference import Case
from tests.sharding.wires.training import alone

TOLERANCE = 1e-6
BOTH = (False, True)
CODECS = ("int8", "int4", "fp8_e4m3")
OF_WEIGHTS, OF_GRADIENTS = (CODECS, CODECS) if FULL_GRID else (("int8", "fp8_e4m3"), ("int4",))
"""`tests/tensors/test_codecs.py` has each codec."""


def _exists(cell: dict[str, Any]) -> bool:
    alike = cell.get("gradients") or cell.get("world", 2) == 2  # else sums in another order than the reference's
    alike = alike and not (cell.get("offload") and cell["stage"] == 0)
    return bool(alike and (cell.get("weights") or cell.get("gradients")))


def _cases() -> list[Case]:
    grid = {
        "stage": (0, 1, 2, 3),
        "world": (2, 3),
        "weights": (None, *OF_WEIGHTS),
        "gradients": (None, *OF_GRADIENTS),
        "feedback": BOTH,
        "accumulation": (1, 2),
        "bf16": BOTH,
        "offload": BOTH,
        "block": (64, 1024),
    }
    models = {
        "family": ("gpt2", "bert", "qwen3_moe", "llama"),
        "stage": (0, 2, 3),
        "weights": ("int8",),
        "gradients": ("int8",),
        "tied": BOTH,
        "lora": BOTH,
        "checkpointing": BOTH,
        "frozen": (None, "int4"),
    }
    copies = {
        "shards": (2,),
        "over": BOTH,
        "copies": ("int8", "int4"),
        "stage": (2, 3),
        "weights": (None, "int8"),
        "gradients": ("int8",),
        "accumulation": (2,),
        "bf16": BOTH,
        "offload": BOTH,
    }
    hops = {"machine": (2,), "stage": (0, 2, 3), "gradients": ("int8", "int4"), "feedback": BOTH}
    second = {"second": (2,), "second_copy": ("encoded", "whole"), "weights": ("int8",), "bf16": BOTH}
    found = [Case(**cell) for cell in cells(grid, allowed=_exists)]
    found += [Case(**cell) for cell in cells(models, PAIRS)]
    fours = [
        *(cell for cell in cells(copies, PAIRS) if cell["over"] or cell["stage"] == 3),
        *cells(hops, PAIRS),
        *({**cell, "gradients": "int8", "accumulation": 2} for cell in cells(second, PAIRS)),
    ]
    return found + [Case(world=4, **cell) for cell in fours]


CASES = _cases()
LABELS = ["-".join(f"{k} {v}" for k, v in vars(case).items() if v != getattr(Case(), k)) for case in CASES]


@pytest.fixture(scope="module")
def on_ranks() -> dict[Case, Any]:
    """Results of every rank; each number of ranks is started once."""
    found: dict[Case, Any] = {}
    for world in sorted({case.world for case in CASES}):
        mine = [case for case in CASES if case.world == world]
        results = run_ranks(jobs.run_cases, world, (mine,), timeout=900)
        for i, case in enumerate(mine):
            found[case] = [result[i] for result in results]
    return found


@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_ranks_equal_one_process_that_rounds_alike(case: Case, on_ranks: dict[Case, Any]) -> None:
    ranks = on_ranks[case]
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    wanted = alone(case)
    for step in range(case.steps):
        loss = sum(rank["losses"][step] for rank in ranks) / case.world
        assert loss == pytest.approx(wanted["losses"][step], rel=TOLERANCE)
        assert ranks[0]["norms"][step] == pytest.approx(wanted["norms"][step], rel=TOLERANCE)
    found = ranks[0]["weights"]
    for name, value in wanted["weights"].items():
        if name in found:
            assert torch.allclose(
                found[name].float(), value.float(), rtol=0, atol=TOLERANCE * float(value.abs().max())
            ), name
    _check_bytes(case, ranks[0])


def _check_bytes(case: Case, rank: dict[str, Any]) -> None:
    """Reductions of one window, and the gather after a step; those of passes: `tests/planning`."""
    codec, size = codec_of(case.gradients, case.block), case.ranks
    numels = rank["shards"]
    if codec is not None and case.machine == 1:
        rounds = case.accumulation if case.stage >= 2 else 1
        each = [(size - 1) * (n // case.block) * (case.block * codec.bits // 8 + 4) for n in numels]
        assert rank["sent"]["shard", "all_to_all"] == rounds * sum(each)
        assert ("shard", "reduce_scatter") not in rank["sent"]
        if case.stage == 0:
            assert rank["sent"]["shard", "all_gather"] == sum(each)
    weights = codec_of(case.weights, case.block)
    if weights is not None and case.stage in (1, 2) and size > 1:
        after = [(size - 1) * (n // case.block) * (case.block * weights.bits // 8 + 4) for n in numels]
        assert rank["sent"]["shard", "all_gather"] == sum(after)


WRITES = [
    Case(stage=stage, weights="int8", gradients="int8", bf16=bf16)
    for stage, bf16 in ((1, False), (2, True), (3, False), (3, True))
]


def test_what_a_user_writes_reaches_its_element_and_no_rounding_reaches_the_masters() -> None:
    over = [Case(world=4, shards=2, over=True, stage=3, weights="int8", copies="int8", bf16=True)]
    for world, cases in ((2, WRITES), (4, over)):
        for case, found in zip(cases, run_ranks(jobs.write_some, world, (cases,))[0], strict=True):
            assert not isinstance(found, str), found
            before, after, read = found["before"], found["after"], found["read"]
            changed = {n for n in before if not torch.equal(before[n], after[n])}
            assert changed == {"model.layers.1.mlp.up_proj.weight"}
            where = (
                before["model.layers.1.mlp.up_proj.weight"] != after["model.layers.1.mlp.up_proj.weight"]
            ).nonzero()
            assert where.tolist() == [[1, 3]]
            dtype = torch.bfloat16 if case.bf16 else torch.float32
            codec, between = codec_of("int8", case.block), codec_of(case.copies if case.over else None, case.block)
            assert codec is not None
            for name, value in before.items():
                flat = value.to(dtype).reshape(-1)
                arrived = codec.rounded(between.rounded(flat) if between else flat).view(value.shape)
                assert torch.equal(read[name], arrived), name
            written = after["model.layers.1.mlp.up_proj.weight"].to(dtype).reshape(-1)
            arrived = codec.rounded(between.rounded(written) if between else written).view(found["again"].shape)
            if case.stage < 3:  # whole weights are there, and stay as they were written until the next step
                arrived = read["model.layers.1.mlp.up_proj.weight"].index_put(
                    (torch.tensor(1), torch.tensor(3)), torch.tensor(0.5, dtype=dtype)
                )
            assert torch.equal(found["again"], arrived)


def test_a_resume_goes_on_bit_for_bit_and_in_another_layout_feedback_begins_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = [
        Case(stage=3, weights="int8", gradients="int4", feedback=True, accumulation=2, bf16=True),
        Case(stage=0, gradients="int4", feedback=True),
    ]
    results = run_ranks(jobs.save_and_resume, 2, (cases, str(tmp_path)))
    for i in range(len(cases)):
        for rank in results:
            found = rank[i]
            assert not isinstance(found, str), found
            assert found["kept"].keys() == found["loaded"].keys() and any(found["kept"].values())
            for name, messages in found["kept"].items():
                assert messages.keys() == found["loaded"][name].keys()
                assert all(torch.equal(v, found["loaded"][name][k]) for k, v in messages.items())
            assert found["straight"][0] == found["resumed"][0]
            assert all(torch.equal(v, found["resumed"][1][n]) for n, v in found["straight"][1].items())
            assert not any(found["reset"])
    assert capfd.readouterr().err.count("error feedback begins again") <= 2


def test_feedback_follows_the_loss_scale() -> None:
    doubling, constant = run_ranks(jobs.scaled, 2, (Case(stage=2, gradients="int8", feedback=True),))[0]
    assert doubling[2] > constant[2] == 4096.0
    assert doubling[0] == pytest.approx(constant[0], rel=1e-5)
    for name, value in doubling[1].items():  # fp16 loses other small gradients under another scale
        apart = float((value - constant[1][name]).norm() / value.norm())
        assert apart < 1e-4, (name, apart)
