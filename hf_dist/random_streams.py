"""Random numbers of ranks that compute one model together: alike where their activations are equal, else each its own.

Ranks start with equal generators. An activation that all of them hold must lose the same elements on each, or they are equal
no longer, and nothing says so. Parts of an activation (positions, heads, columns) must not: one process draws every element
by itself.

[Note: streams] A rank's own stream starts at a number drawn from the common one and its rank. So it has no state that would
have to be kept: a block that is computed again from the common state of its beginning draws what it drew. For that it must
begin in the common stream, and a computation that ends early, inside of another one, leaves nothing behind: a stream that is
not the generators' any more is forgotten.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Streams", "drops", "stream_digest"]


def drops(model: nn.Module) -> bool:
    """Whether anything in `model` draws random numbers in training: dropout, as a module or as a number of its own."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                return True
            continue
        values = ((name, value) for name, value in vars(module).items() if "drop" in name)
        if any(isinstance(value, float) and 0 < value <= 1 for _, value in values):
            return True
    return False


class Streams:
    """The generators of one rank; they draw alike until `own`, and again from `alike`."""

    def __init__(self, rank: int) -> None:
        """`rank`: among those that share a model."""
        self.rank = rank
        self._alike: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._seed = 0

    def own(self) -> None:
        """Draw as no other rank does from now on. Local; every rank calls it at the same place of its common stream."""
        if self._is_own:
            return
        seed = int(torch.randint(2**62, ()))
        self._alike, self._seed = _state(), (seed + self.rank) % 2**63
        torch.manual_seed(self._seed)

    def alike(self) -> None:
        """Go on in the common stream. Local."""
        state = self._alike
        if self._is_own and state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1])
        self._alike = None

    @property
    def _is_own(self) -> bool:
        return self._alike is not None and torch.initial_seed() == self._seed


def _state() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def stream_digest() -> list[torch.Tensor]:
    """The generators that dropout draws from, to compare them."""
    return [state for state in _state() if state is not None]
