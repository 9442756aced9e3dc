"""Pipeline stages x data ranks x ZeRO stage equal one process: loss on every rank, gradient norm, every weight."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import replace

import pytest

from tests.harness import run_ranks
from tests.parity.pipelines import PipelineCase, reference, run_cases
from tests.parity.train import relative
from tests.pipeline.zoo import CONFIGS

TOLERANCE = 1e-5
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
WORK = list(itertools.product((2, 4, 5), (False, True), (False, True)))  # microbatches, tied, checkpointing


FULL = os.environ.get("HF_DIST_FULL_GRID") == "1"


def llama_cases(pp: int, dp: int) -> list[PipelineCase]:
    """ZeRO stage x schedule, and over these the rest in turn; all of it with HF_DIST_FULL_GRID=1."""
    cells = list(itertools.product((0, 1, 2, 3), SCHEDULES))
    cases = []
    for i, (stage, (schedule, virtual)) in enumerate(cells):
        for count, tied, checkpointing in WORK if FULL else [WORK[(5 * i + pp + 7 * dp) % len(WORK)]]:
            cases.append(PipelineCase("Llama", pp, dp, stage, schedule, virtual, count, tied, checkpointing))
    return [
        *cases,
        PipelineCase("Llama", pp, dp, 3, reshard=True),
        PipelineCase("Llama", pp, dp, 2, "gpipe", reshard=True),
        PipelineCase("Llama", pp, dp, 3, offload=True),
        PipelineCase("Llama", pp, dp, 1, "zb_h1", tied=True, offload=True),
    ]


FAMILIES = [PipelineCase(family, 2, 2, 3) for family in CONFIGS if family != "Llama"]
MIXTURES = ("Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3")
USED_OFTEN = [  # weights that a stage uses several times: experts in a loop, tables of relative positions
    *(PipelineCase(family, 2, 1, 1, "zb_h1", experts=how) for family in MIXTURES for how in ("eager", "batched_mm")),
    *(PipelineCase(family, 2, 1, 1, "zb_h1") for family in ("DebertaV2", "T5")),
    PipelineCase("Mixtral", 2, 1, 0, "zb_h1", microbatches=2, experts="eager", checkpointing=True),
]
USED_OFTEN_ON_FOUR = [
    PipelineCase("Qwen3Moe", 2, 2, 3, "zb_h1", microbatches=5, experts="eager"),
    PipelineCase("GptOss", 2, 2, 2, "zb_h1", experts="eager", offload=True),
]
GRID = {f"pp{pp}-dp{dp}": llama_cases(pp, dp) for pp in (2, 3, 4) for dp in (1, 2)}
GRID |= {"families": FAMILIES[::2], "more families": FAMILIES[1::2]}
GRID |= {"used often": USED_OFTEN, "used often, 4 ranks": USED_OFTEN_ON_FOUR}


@functools.cache
def results(row: str) -> list[list[object]] | str:
    """One spawn for all cases of a row; its error if it failed as a whole, so that it is not tried again."""
    try:
        return run_ranks(run_cases, GRID[row][0].world, (GRID[row],), timeout=7200 if FULL else 1200)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("row", "index"),
    [pytest.param(row, i, id=str(case)) for row, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process(row: str, index: int) -> None:
    case, outcome = GRID[row][index], results(row)
    assert not isinstance(outcome, str), outcome
    ranks = [rank[index] for rank in outcome]
    expected = reference(*case.work)
    held: dict[str, int] = {}
    for found in ranks:
        assert not isinstance(found, str), found
        assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for name, weight in found["weights"].items():
            held[name] = held.get(name, 0) + 1
            assert relative(weight, expected["weights"][name]) < TOLERANCE, name
    assert held.keys() == expected["weights"].keys()
    assert min(held.values()) >= case.dp  # every weight on each data rank of its stage, and most of them nowhere else
    assert sum(held.values()) < case.world * len(held)


HALF = [
    PipelineCase(family, precision="bf16") for family in ("Llama", "Gemma3", "Mixtral", "GPT2", "ViT", "T5", "Bart")
]
HALF += [PipelineCase(precision="fp16"), PipelineCase("Mixtral", schedule="zb_h1", precision="bf16", experts="eager")]
BF16_RESOLUTION = 2**-8


@functools.cache
def half_results(pp: int) -> list[list[object]]:
    """Of the rank with the loss: the same engine on one stage and on two."""
    return run_ranks(run_cases, pp, ([replace(case, pp=pp) for case in HALF],), timeout=600)[-1]


@pytest.mark.parametrize("index", range(len(HALF)), ids=map(str, HALF))
def test_a_model_loaded_in_fp32_and_run_in_half_precision_equals_one_stage(index: int) -> None:
    """Stand-ins for modules of other stages answer in the dtype of the run: rotary tables and masks take theirs from it.

    In the first window; after it a last bit of the norm decides how a weight is rounded to half precision. What two stages
    add to one gradient (tied weights, encoder states) autograd adds in half precision where both are in one process.
    """
    expected, found = half_results(1)[index], half_results(2)[index]
    assert isinstance(expected, dict), expected
    assert isinstance(found, dict), found
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=TOLERANCE)
    assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=BF16_RESOLUTION)
