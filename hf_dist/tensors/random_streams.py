"""Random numbers of ranks that compute one model together: a common stream for equal activations, own streams for parts.

Ranks start with equal generators. Dropout of an activation that all ranks hold must drop the same elements on each; otherwise
the copies silently diverge. Dropout of parts of an activation (positions, heads, columns) must differ between ranks, because
one process draws independently for every element.

[Note: streams] A rank's own stream is seeded from its rank and a number drawn from the common stream, so it has no state to
save: a block that is recomputed from its initial common state draws the same numbers. For that, every block must begin in the
common stream. A recomputation that stops early inside a block leaves no trace: once the generators have another seed, the own
stream counts as ended.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Streams", "drops", "random_state", "set_random_state", "stream_digest"]


def drops(model: nn.Module) -> bool:
    """Whether `model` draws random numbers in training: dropout, as a module or as a float attribute named "drop..."."""
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
    """The generators of one rank: `own` switches to the rank's own stream, `alike` back to the common one."""

    def __init__(self, rank: int) -> None:
        """`rank`: coordinate among the ranks that share a model."""
        self.rank = rank
        self._alike: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._seed = 0

    def own(self) -> None:
        """Switch to this rank's own stream. Local; every rank calls it at the same position of the common stream."""
        if self._is_own:
            return
        seed = int(torch.randint(2**62, ()))
        self._alike, self._seed = random_state(), (seed + self.rank) % 2**63
        torch.manual_seed(self._seed)

    def alike(self) -> None:
        """Continue the common stream. Local."""
        state = self._alike
        if self._is_own and state is not None:
            set_random_state(state)
        self._alike = None

    @property
    def _is_own(self) -> bool:
        return self._alike is not None and torch.initial_seed() == self._seed


def random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The generators that dropout draws from: the host's, and the current GPU's once it is in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Go on from a `random_state` of this process."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def stream_digest() -> list[torch.Tensor]:
    """`random_state` as a list, to compare between ranks. Local."""
    return [state for state in random_state() if state is not None]
