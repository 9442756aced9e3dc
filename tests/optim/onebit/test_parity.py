"""1-bit optimizers on several ranks: one process that sends itself the same messages; bytes, skipped steps, resuming."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_dist.tensors.codecs import Signs
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.optim.onebit.reference import Case
from tests.optim.onebit.training import TOLERANCE, all_on_rank, alone, on_two
from tests.parity.train import relative

# Not GPT-2 or BERT: the gradient of their key biases is zero but for rounding, and a message has its sign.
TWO = [
    Case(),
    Case(stage=1, accumulation=2, clip=0.5),
    Case("OneBitLamb", stage=1, tied=True, model="qwen3"),
    Case("OneBitLamb", frozen=True, bias_correction=False),
    Case("ZeroOneAdam", stage=1, freeze=5, steps=8, lora=True),
    Case("ZeroOneAdam", freeze=5, steps=8, dtype="bf16", model="t5"),
    Case(dtype="fp16", scale=128.0, clip=0.5, checkpointing=True),
    *(Case(kind, stage=stage, model="heads") for kind in ("OneBitAdam", "OneBitLamb") for stage in (0, 1)),
    Case(model="heads", stage=1, dtype="bf16", overflow=(1, 3)),
    Case("ZeroOneAdam", model="heads", dtype="fp16", scale=8.0, overflow=(3, 5), freeze=4, steps=8),
    Case(model="heads", block=256, freeze=1),
]
THREE = [
    Case(world=3, stage=1, block=256),
    Case("OneBitLamb", world=3, model="heads"),
    Case(world=3, model="heads", dtype="bf16", overflow=(4,)),
]
ONE = [
    Case(world=1, model="heads"),
    Case("OneBitLamb", world=1, stage=1, model="heads"),
    Case("ZeroOneAdam", world=1, model="heads", freeze=4),
]
if FULL_GRID:
    kinds, models = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), ("llama", "qwen3", "t5", "heads")
    TWO += [Case(k, s, 2, m, a) for k, s, m, a in itertools.product(kinds, (0, 1), models, (1, 3))]
    THREE += [Case(k, s, 3, m) for k, s, m in itertools.product(kinds, (0, 1), models)]


CASES = {1: ONE, 2: TWO, 3: THREE}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Job -> what each rank found; each number of ranks is started once. Jobs on two ranks are named by what they do."""
    folder = str(tmp_path_factory.mktemp("saved"))
    found = run_ranks(on_two, 2, (TWO, folder))
    several = {job: [rank[job] for rank in found] for job in found[0]}
    return {**several, "1": [all_on_rank(0, 1, ONE)], "3": run_ranks(all_on_rank, 3, (THREE,))}


@pytest.mark.parametrize("case", [*ONE, *TWO, *THREE], ids=str)
def test_ranks_are_one_process_that_sends_itself_the_same_signs(case: Case, on_ranks: Any) -> None:
    rows = [rank[CASES[case.world].index(case)] for rank in on_ranks[str(case.world)]]
    expected = alone(case, rows[0]["norms"])
    losses = [sum(each) / case.world for each in zip(*(row["losses"] for row in rows), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=TOLERANCE, nan_ok=True)
    for row in rows:
        assert row["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE, nan_ok=True)
        assert row["steps"] == case.steps - len(case.overflow)
        assert all(torch.equal(row["own"][n], weights) for n, weights in rows[0]["own"].items()), "ranks differ"
    for name, weights in expected["weights"].items():
        assert relative(rows[0]["weights"][name], weights) < TOLERANCE, name


@pytest.mark.parametrize("case", [case for case in (*TWO, *THREE) if case.model != "heads"], ids=str)
def test_after_the_warm_up_a_step_sends_a_bit_an_element_and_a_scale_a_block_both_ways(
    case: Case, on_ranks: Any
) -> None:
    row = on_ranks[str(case.world)][0][CASES[case.world].index(case)]
    parts = sum(Signs(case.block).nbytes(numel) for _, numel in row["groups"])
    assert parts == sum(numel // 8 + 4 * numel // case.block for _, numel in row["groups"])
    weights = (
        sum(numel for _, numel in row["groups"]) * (2 if case.dtype in ("bf16", "fp16") else 4) if case.stage else 0
    )
    assert row["sent"]["shard", "all_to_all"] == parts * (case.world - 1)
    assert row["sent"]["shard", "all_gather"] == (parts + weights) * (case.world - 1)


def test_a_resume_in_the_compressed_phase_has_the_same_bits(on_ranks: Any) -> None:
    for rank in on_ranks["resumed"]:
        for before, after in rank:
            assert all(torch.equal(before[n], after[n]) for n in before)


def test_in_another_layout_momentum_goes_on_and_feedback_begins_again(on_ranks: Any) -> None:
    for rank in on_ranks["moved"]:
        for before, after, rests in rank:
            assert all(torch.equal(before[n], after[n]) for n in before) and before
            assert rests == 0


def test_until_the_step_a_rank_has_its_own_gradient_and_the_norm_is_that_of_all(on_ranks: Any) -> None:
    for (own, mean, norm, weight), (other, same, other_norm, other_weight) in zip(*on_ranks["looked at"], strict=True):
        assert own.shape == mean.shape == weight.shape and not torch.equal(own, other)
        assert torch.allclose(mean, (own + other) / 2, atol=1e-8) and torch.equal(mean, same)
        assert norm == other_norm > float(mean.norm()) and torch.equal(weight, other_weight)


def test_an_optimizer_that_the_model_was_not_prepared_for_is_refused(on_ranks: Any) -> None:
    assert all('name it in the config, "optimizer": {"type": "OneBitAdam"' in said for said in on_ranks["refused"])
