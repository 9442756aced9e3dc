"""Losses that read `lm_head.weight` instead of calling the head get all of it: one process's loss and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from tests.parallel.tensor import fused
from tests.parallel.tensor.on_ranks import HIDDEN
from tests.parity.train import relative


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_reads_the_heads_weight_equals_one_process(stage: int) -> None:
    alone, ranks = run_ranks(fused.run, 1, (stage,))[0], run_ranks(fused.run, 2, (stage,))
    for rank, outcomes in enumerate(ranks):
        for expected, found in zip(alone, outcomes, strict=True):
            assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            for name, gradient in expected["gradients"].items():
                assert relative(found["gradients"][name], gradient) < 1e-5, name
            assert torch.allclose(found["logits"], expected["logits"], atol=1e-5)
            assert found["outside"] == ((50, 51)[rank], HIDDEN)
            assert (found["class"], found["is"]) == ("Linear", True)
            assert found["gathers"].count(51 * HIDDEN * 4) == 1  # for both reads, in parts of the larger size
