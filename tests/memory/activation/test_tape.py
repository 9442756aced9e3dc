"""A decision of a checkpointed call is made once, and taken over by its recomputation."""

from __future__ import annotations

import torch

from hf_dist.memory.activation.checkpoint import BlockCheckpoint
from hf_dist.memory.activation.tape import Tape, kept


def test_decisions_are_given_back_in_their_order() -> None:
    made = iter(range(10))

    def block() -> tuple[int, int]:
        return kept(lambda: next(made)), kept(lambda: next(made))

    first, second = Tape(), Tape()
    assert first.call(block) == (0, 1)
    assert second.call(block) == (2, 3)
    assert first.call(block) == (0, 1)
    assert kept(lambda: next(made)) == 4  # outside of a call nothing is kept


def test_a_recomputed_block_does_not_decide_anew() -> None:
    made: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        def decide() -> int:
            made.append(len(made) + 2)
            return made[-1]

        return (x * kept(decide)).sin()

    checkpoint = BlockCheckpoint({})
    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x).sum().backward()
    assert made == [2]
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * torch.cos(2 * torch.ones(3)))
