"""Two and four ranks on one card, over gloo with tensors on the device: every axis, where there is one GPU only."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from tests.gpu.place import GPUS, join, needs
from tests.gpu.test_parity import CUT, SEQUENCES, check, check_equal, results
from tests.harness import run_ranks
from tests.parallel.sequence import train as sequences

pytestmark = needs(1)
CELLS = [(world, index) for world in CUT for index in range(len(CUT[world]))] if GPUS else [(2, 0)]


@pytest.mark.parametrize(("world", "index"), CELLS, ids=[f"{w}-{CUT[w][i]}" for w, i in CELLS])
def test_ranks_that_share_a_layer_equal_one_process_on_the_cpu(world: int, index: int) -> None:
    """Matrices, experts, HSDP."""
    check(CUT[world][index], [rank[index] for rank in results(world, True, cut=True)])


def over_sequences(rank: int, world: int) -> list[Any]:
    """Every case in which ranks share sequences."""
    join(rank, world, shared=True)
    os.environ["LOCAL_RANK"] = "0"  # all take the first GPU
    return sequences.run_cases(rank, world, SEQUENCES)


@functools.cache
def shared_sequences() -> list[list[Any]]:
    """One spawn."""
    return run_ranks(over_sequences, 2, timeout=500)


@pytest.mark.parametrize("index", range(len(SEQUENCES)), ids=[str(c) for c in SEQUENCES])
def test_ranks_that_share_sequences_equal_one_process_on_the_cpu(index: int) -> None:
    check_equal(sequences.reference(SEQUENCES[index], 1), [rank[index] for rank in shared_sequences()])
