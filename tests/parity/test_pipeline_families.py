"""Families of models over pipeline stages equal one process; weights that a stage uses several times; half precision."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.pipeline.zoo import CONFIGS, SEQ2SEQ
from tests.parity.pipeline_grid import STEPS, TOLERANCE, check_equals_one_process, runner
from tests.parity.pipelines import PipelineCase, run_cases

case_of = functools.partial(PipelineCase, microbatches=3)  # of three lengths
FEW = ("Gemma3", "GptOss", "DebertaV2", "ViT", "T5")
"""Two kinds of blocks, sinks, tables, images, an encoder; `parallel/pipeline/test_parity.py` splits more of them in one
process."""
FAMILIES = [
    case_of(family, *((4, 1) if family in SEQ2SEQ else (2, 2)), 3)  # so that three stages use one embedding
    for family in (CONFIGS if FULL_GRID else FEW)
    if family != "Llama" and (FULL_GRID or family in (FEW[0], *SEQ2SEQ))
]
ON_TWO = [case_of(family, 2, 1, 3) for family in FEW if not FULL_GRID and family not in (FEW[0], "DebertaV2", *SEQ2SEQ)]
"""DebertaV2: `USED_OFTEN`. Data ranks beside the stages are one family's by default; `test_pipeline.py` has them with
Llama."""
EXPERTS = [
    (family, how) for family in ("Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3") for how in ("eager", "batched_mm")
]
USED_OFTEN = [  # weights that a stage uses several times: experts in a loop, tables of relative positions
    *(case_of(family, 2, 1, 1, "zb_h1", experts=how) for family, how in (EXPERTS if FULL_GRID else ())),
    # `parallel/pipeline/test_parity.py` splits the backward of T5.
    *(case_of(family, 2, 1, 1, "zb_h1") for family in (("DebertaV2", "T5") if FULL_GRID else ("DebertaV2",))),
    PipelineCase("Mixtral", 2, 1, 0, "zb_h1", microbatches=2, experts="eager", checkpointing=True),
]
USED_OFTEN_ON_FOUR = [
    PipelineCase("Qwen3Moe", 2, 2, 3, "zb_h1", microbatches=5, experts="eager"),
    case_of("GptOss", 2, 2, 2, "zb_h1", experts="eager", offload=True),
]
CUT = [  # parts of the sequence travel between stages; encoder and decoder have stacks of their own
    case_of(family, 2, 1, stage, "interleaved_1f1b", 2, tp=2, checkpointing=checkpointing)
    for family, stage, checkpointing in (
        ("Bart", 1, True),
        ("Phi3", 3, False),
        ("Qwen3Moe", 2, True),
        ("Falcon", 0, False),
    )
]
GRID = {"2 ranks": [*ON_TWO, *USED_OFTEN], "4 ranks": [*FAMILIES, *([*USED_OFTEN_ON_FOUR, *CUT] if FULL_GRID else [])]}
"""`test_pipeline.py` has parts of sequences between stages."""
GRID = {row: [replace(case, steps=STEPS) for case in cases] for row, cases in GRID.items()}
results = runner(GRID)


@pytest.mark.parametrize(
    ("row", "index"),
    [pytest.param(row, i, id=str(case)) for row, cases in GRID.items() for i, case in enumerate(cases)],
)
def test_equals_one_process(row: str, index: int) -> None:
    check_equals_one_process(GRID[row][index], results(row), index)


HALF = [
    PipelineCase(family, precision="bf16")
    for family in ("Llama", "Gemma3", "Mixtral", "GPT2", "ViT", "T5", "Bart")
    if FULL_GRID or family == "Gemma3"  # rotary tables and masks
]
HALF += [PipelineCase(precision="fp16")]
HALF += [PipelineCase("Mixtral", schedule="zb_h1", precision="bf16", experts="eager")] if FULL_GRID else []
BF16_RESOLUTION = 2**-8


@functools.cache
def half_results(pp: int) -> list[list[object]]:
    """Of the rank with the loss: the same engine on one stage and on two."""
    return run_ranks(run_cases, pp, ([replace(case, pp=pp, steps=1) for case in HALF],), timeout=600)[-1]


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
