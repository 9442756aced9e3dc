"""As `test_parity.py`: recurrences, convolutions, encoders with decoders, and kernels of CUDA by stand-ins."""

from __future__ import annotations

import pytest

from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.parallel.sequence.test_parity import check
from tests.parallel.sequence.train import KINDS, Case

LEFT = (*KINDS, "left")
"""A layer that mixes positions forgets the padding on the right without a trace."""
TWO = (
    Case("mamba", stage=0, kinds=("plain", "ragged", "masked")),
    Case("mamba2", stage=3, kinds=("plain", "ragged", "masked", "left"), checkpointing=True),
    Case("mamba2-groups", stage=1, kinds=("plain",), accumulation=1),
    Case("qwen3next", stage=3, kinds=LEFT, checkpointing=True),
    Case("qwen3next", "ring", stage=1, kinds=LEFT, checkpointing=True),
    Case("lfm2", "gather", stage=2),
    Case("lfm2", "ring", stage=3),
    *(
        Case(f, e, stage=s, kinds=("plain", "ragged", "masked"))
        for f in ("bart", "t5")
        for e, s in (("ulysses", 3), ("gather", 1))
    ),
    Case("t5", stage=2, kinds=("plain", "ragged"), checkpointing=True),
    Case("bart-decoder", stage=3, kinds=("plain", "ragged")),
    *(
        Case("mistral", exchange, kernel=kernel, kinds=("plain", "ragged"), accumulation=1)
        for exchange in ("ulysses", "gather")
        for kernel in ("flash_attention_2", "flex_attention")
    ),
    Case("bert", "gather", kernel="flash_attention_3", kinds=("plain", "ragged")),
)
FOUR = (
    Case("mamba2", stage=3, cp=4, kinds=("plain", "ragged")),
    Case("t5", "auto", stage=3, cp=4, kinds=("plain", "ragged"), length=61),
    Case("qwen3next", (2, 2), stage=2, cp=4, kinds=LEFT, checkpointing=True),
    Case("bert", "gather", stage=2, cp=4, kinds=("plain", "ragged")),
)
BY_DEFAULT = (
    "mamba-auto-z0-cp2",
    "mamba2-auto-z3-cp2-checkpointing",
    "mamba2-groups-auto-z1-cp2",
    "qwen3next-auto-z3-cp2-checkpointing",
    "lfm2-ring-z3-cp2",
    "t5-auto-z2-cp2-checkpointing",
    "mistral-gather-z3-cp2-flash_attention_2",
)
"""On two ranks; `test_parity.py` has four, whose exchanges are the same for every layer."""
TWO = TWO if FULL_GRID else tuple(case for case in TWO if str(case) in BY_DEFAULT)


@pytest.mark.parametrize("index", range(len(TWO)), ids=[str(case) for case in TWO])
def test_two_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(TWO, index, 2)


@FULL_GRID_ONLY
@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_that_share_sequences_equal_one_process(index: int) -> None:
    check(FOUR, index, 4)
