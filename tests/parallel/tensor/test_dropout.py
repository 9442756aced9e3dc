"""Dropout over split matrices: ranks drop the same of what is equal on them, each its own of what it has alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.tensor.dropping import dropped, resumed, seeded_apart

CASES = [("gpt2", False), ("gpt2", True), ("neox", False), ("neox", True), ("lora", False), ("lora", True)]
# Regions change only what is dropped between them.
CASES = CASES if FULL_GRID else [("gpt2", True), ("neox", True), ("lora", False)]
BLOCKS = 2
ALIKE = {
    # embeddings; attention's weights, behind its rows, behind the MLP's
    ("gpt2", False): [True, *[False, True, True] * BLOCKS],
    ("gpt2", True): [True, *[False, True, True] * BLOCKS],  # both inside of a region: parts of one sum
    # embeddings; attention's weights, behind attention, behind the MLP
    ("neox", False): [True, *[False, True, True] * BLOCKS],
    ("neox", True): [True, *[False, False, False] * BLOCKS],  # between regions each rank has its own tokens
    # inputs of q, o, up, down
    ("lora", False): [True, False, True, False] * 3,
    ("lora", True): [True, False, True, False] * 3,
}


@functools.cache
def outcomes() -> list[list[dict[str, Any]]]:
    return run_ranks(dropped, 2, (CASES,))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}{'-regions' * on}" for name, on in CASES])
def test_ranks_drop_alike_what_they_all_have_and_apart_what_is_theirs(index: int) -> None:
    first, second = (rank[index]["kept"] for rank in outcomes())
    assert len(first) == len(second) == len(ALIKE[CASES[index]])
    for alike, one, other in zip(ALIKE[CASES[index]], first, second, strict=True):
        agreement = float((one == other).float().mean())
        assert agreement == 1.0 if alike else 0.35 < agreement < 0.65, agreement  # half by chance


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}{'-regions' * on}" for name, on in CASES])
def test_ranks_stay_equal_and_blocks_drop_again_what_they_dropped(index: int) -> None:
    ranks = [rank[index] for rank in outcomes()]
    losses, norms, drawn = ranks[0]["plain"]
    assert len(set(losses)) == len(losses)
    for rank in ranks:
        for way in ("plain", "again"):
            assert rank[way][0] == pytest.approx(losses, rel=1e-6)
            assert rank[way][2] == drawn
            for name, value in rank[way][1].items():
                assert torch.allclose(value, norms[name], rtol=1e-5, atol=1e-7), name
    for name, value in norms.items():
        assert torch.equal(value, ranks[1]["plain"][1][name]), name


def test_ranks_that_read_the_same_rows_resume_alike_from_ranks_that_did_not(tmp_path: Path) -> None:
    first, second = run_ranks(resumed, 2, (str(tmp_path),))
    assert first == second


def test_a_rank_that_draws_other_numbers_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 draws other random numbers than rank 0"):
        run_ranks(seeded_apart, 2)
