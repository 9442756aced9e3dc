"""Training with split sequences equals one process: losses, norms, every weight, at relative 1e-5."""

from __future__ import annotations

import pytest

from tests.covering import FULL_GRID
from tests.parallel.sequence.train import Case, check

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
TWO = (
    *TWO,  # families with the exchanges that others have
    Case("gemma2", "gather", stage=2),
    Case("deepseek3", "ring", stage=3),
    Case("llama4", "ring", stage=2, kinds=("plain", "ragged", "masked")),
    Case("bert", "gather", stage=3, kinds=("plain", "ragged")),
    Case("mistral", "gather", 0),
    # A token or two per rank: kernels and masks treat a single query apart.
    *(
        Case(family, exchange, 2, length=length, kinds=("plain", "masked"))
        for family in ("llama", "mistral", "gemma2")
        for exchange in ("gather", "ring", "ulysses")
        for length in (2, 3)
        if (family, exchange) != ("gemma2", "ring")  # refused: soft caps
    ),
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
    Case(shard=2, cp=4, over=True),
    Case("mixtral", stage=3, shard=2, cp=4, ep=2, over=True),
    Case(stage=3, shard=1, cp=2, over=True, lora=True),  # two axes of copies
    Case(stage=1, shard=2, cp=2, over=True),
    Case(stage=2, shard=1, pp=2, accumulation=4, over=True),
    Case("mistral", stage=2, shard=1, tp=2, over=True),
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
THREE = (
    Case("llama-odd", stage=3, cp=3),
    Case(exchange="auto", cp=3, stage=2),
    Case(exchange="ring", cp=3, stage=1),
    Case(exchange="ring", cp=3, stage=2, length=2, kinds=("plain",), accumulation=1),
)
BY_DEFAULT = (
    "llama-mqa-auto-z3-cp2-checkpointing",
    "llama-classifier-ring-z0-cp2",
    "bert-tokens-gather-z1-cp2",
    "llama-auto-z2-cp2-fp16",
    # Attention of its own: positions of the whole row, one more logit, keys wider than values; a routers' loss.
    "llama-dynamic-auto-z3-cp2",
    "gptoss-auto-z3-cp2",
    "deepseek3-auto-z3-cp2",
    "qwen3moe-auto-z3-cp2",
    "opt-auto-z3-cp2",
    # More ranks: both kinds of exchange, heads that do not divide, rows shorter than the ranks.
    "mistral-ulysses2ring2-z3-cp4-shard2-checkpointing",
    "llama-auto-z3-cp2-shard1-over-lora",
    "llama-odd-auto-z3-cp3",
    "llama-ring-z2-cp3-length2",
    "llama-gather-z2-cp2-length2",
)
"""What `parity/test_mixed.py` does not have."""
if not FULL_GRID:
    TWO, FOUR, THREE = (tuple(case for case in cases if str(case) in BY_DEFAULT) for cases in (TWO, FOUR, THREE))


@pytest.mark.parametrize("index", range(len(TWO)), ids=[str(case) for case in TWO])
def test_two_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(TWO, index, 2)


@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_of_which_some_share_sequences_equal_one_process(index: int) -> None:
    check(FOUR, index, 4)


@pytest.mark.parametrize("index", range(len(THREE)), ids=[str(case) for case in THREE])
def test_three_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(THREE, index, 3)
