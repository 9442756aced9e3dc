"""Training with split sequences equals one process: losses, norms, every weight, at relative 1e-5."""

from __future__ import annotations

import pytest

from tests.covering import FULL_GRID
from tests.sequence.train import Case, check

TWO = (
    *(Case(stage=stage) for stage in (0, 1, 2, 3)),
    Case(exchange="gather", stage=2),
    Case(exchange="ring", stage=3),
    Case("llama-tied", "gather", 1),
    Case("llama-mqa", stage=3, checkpointing=True),
    Case("qwen3", "ring", 3, checkpointing=True),
    Case("mistral", "ulysses", 3, checkpointing=True),
    Case("mistral", "ring", 1),
    Case("gemma2", stage=3),
    Case("gemma3", stage=3),
    Case("phi3-longrope", stage=3, kinds=("plain", "ragged", "masked")),
    Case("llama-dynamic", stage=3, kinds=("plain", "ragged", "masked")),
    Case("gptoss", stage=3),
    Case("deepseek3", stage=3),
    Case("qwen3moe", stage=3),
    Case("llama4", stage=3, kinds=("plain", "ragged", "masked")),
    Case("gpt2", stage=3),
    Case("opt", stage=3, kinds=("plain", "ragged", "masked")),
    Case("bert", stage=3, kinds=("plain", "ragged")),
    Case("roberta", stage=3, kinds=("plain", "ragged")),
    Case("modernbert", stage=3, kinds=("plain", "ragged")),
    Case("llama-classifier", stage=3, kinds=("plain", "ragged")),
    Case("llama-classifier", "ring", stage=0, kinds=("plain", "ragged")),
    Case("llama-qa", stage=3, kinds=("plain", "ragged")),
    Case("bert-tokens", "gather", stage=1, kinds=("plain", "ragged")),
    Case(stage=3, lora=True, checkpointing=True),
    Case(stage=2, offload=True),
    Case(stage=3, tiled=True),
    Case(stage=3, tiles=5, on_host=True),
    Case(stage=2, tiles=3),
    Case(stage=3, budget=True),
    *(Case(exchange=exchange, stage=3, dtype="bf16") for exchange in ("ulysses", "gather", "ring")),
    Case(stage=2, dtype="fp16"),
    Case(stage=3, length=2, kinds=("plain",)),
    Case(stage=3, length=7, kinds=("plain", "masked")),
)
LIKE_OTHERS = (  # a mechanism that another case has: stages, sliding windows, positions, an encoder, tiles
    *(Case(stage=stage) for stage in (0, 1, 2)),
    *(Case(family, stage=3) for family in ("gemma3", "gpt2")),
    *(Case(family, stage=3, kinds=("plain", "ragged")) for family in ("bert", "roberta", "llama-classifier")),
    Case("mistral", "ulysses", 3, checkpointing=True),
    Case("mistral", "ring", 1),
    Case(exchange="ring", stage=3),  # qwen3, and in bf16
    Case(stage=3, lora=True, checkpointing=True),
    Case(stage=2, tiles=3),
    Case(stage=3, budget=True),  # `parity/test_mixed.py`
    *(Case(exchange=exchange, stage=3, dtype="bf16") for exchange in ("ulysses", "gather")),  # ulysses: fp16
    Case(stage=3, length=2, kinds=("plain",)),  # length 3 on four ranks
)
TWO = (
    tuple(case for case in TWO if case not in LIKE_OTHERS)
    if not FULL_GRID
    else (
        *TWO,  # families with the exchanges that others have
        Case("gemma2", "gather", stage=2),
        Case("deepseek3", "ring", stage=3),
        Case("llama4", "ring", stage=2, kinds=("plain", "ragged", "masked")),
        Case("bert", "gather", stage=3, kinds=("plain", "ragged")),
        Case("mistral", "gather", 0),
    )
)
FOUR = (
    Case(stage=3),
    Case(stage=3, shard=2),
    Case(shard=2, cp=4, lora=True),
    Case("mistral", (2, 2), stage=3, shard=2, cp=4, checkpointing=True),
    Case("llama-tied", "ring", stage=3, shard=1, cp=2, lora=True),
    Case("mixtral", stage=3, shard=2, cp=4, ep=2),
    Case(stage=3, shard=1, pp=2, accumulation=4),
    Case("mistral", stage=3, shard=1, tp=2),
    Case("mistral", (2, 2), 3, cp=4, checkpointing=True),
    Case("llama-odd", "auto", 2, cp=4),
    Case("llama-mqa", stage=3, cp=4),
    Case(stage=1, cp=4, length=3, kinds=("plain",)),
    Case(stage=3, tp=2),
    Case("mistral", "ring", stage=1, tp=2, checkpointing=True),
    Case("mixtral", stage=3, ep=2),
    Case(stage=1, pp=2, accumulation=4),
    Case("mistral", "ring", stage=3, pp=2, accumulation=4, checkpointing=True),
    Case("bert", stage=2, pp=2, accumulation=4, kinds=("plain", "ragged")),
)
FOUR = FOUR if FULL_GRID else (*FOUR[3:5], FOUR[9], FOUR[11], FOUR[13])
"""What `parity/test_mixed.py` does not have: exchanges of both kinds, odd heads, short rows, and a ring beside another axis."""
THREE = (Case("llama-odd", stage=3, cp=3), Case(exchange="auto", cp=3, stage=2), Case(exchange="ring", cp=3, stage=1))
THREE = THREE if FULL_GRID else THREE[:2]


@pytest.mark.parametrize("index", range(len(TWO)), ids=[str(case) for case in TWO])
def test_two_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(TWO, index, 2)


@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_of_which_some_share_sequences_equal_one_process(index: int) -> None:
    check(FOUR, index, 4)


@pytest.mark.parametrize("index", range(len(THREE)), ids=[str(case) for case in THREE])
def test_three_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(THREE, index, 3)
