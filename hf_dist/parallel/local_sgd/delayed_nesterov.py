"""The outer step of replicas that come one at a time: every movement is applied at once, their momentum after a round of them.

    a push                 weights -= rate / N * movement          movement: where a replica was - where it is
    the N-th of a round    momentum = factor * momentum + mean of the round's movements
                           weights -= rate * factor * momentum

N is the number of replicas when the round begins. With one replica this is Nesterov's momentum, as in synchronous DiLoCo. A
momentum that is applied at every push would repeat directions that are out of date by then.
Source: delayed Nesterov, Liu et al. 2024 (arXiv 2401.09135), with c = 0.
"""

from __future__ import annotations

import torch

__all__ = ["DelayedNesterov"]


class DelayedNesterov:
    """Weights in fp32 and what steps them, 1-D, on the host."""

    def __init__(self, numel: int, rate: float, factor: float) -> None:
        """`factor`: of the momentum; 0: no momentum, and no state but the weights."""
        self._rate, self._factor = rate, factor
        self.weights = torch.zeros(numel)
        self.momentum = torch.zeros(numel if factor else 0)
        self.partial = torch.zeros(numel if factor else 0)
        """Sum of the movements of this round."""
        self.count = 0
        """Pushes of this round so far."""
        self.round = 1
        """Pushes in this round."""

    def push(self, moved: torch.Tensor, replicas: int) -> None:
        """Apply the movement of one of `replicas`. Local."""
        if self.count == 0:
            self.round = replicas
        self.count += 1
        self.weights.sub_(moved, alpha=self._rate / self.round)
        if self._factor:
            self.partial.add_(moved)
        if self.count < self.round:
            return
        self.count = 0
        if self._factor:
            self.momentum.mul_(self._factor).add_(self.partial, alpha=1 / self.round)
            self.weights.sub_(self.momentum, alpha=self._rate * self._factor)
            self.partial.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of weights and states."""
        return sum(t.nbytes for t in (self.weights, self.momentum, self.partial))
