"""Steps any unmodified optimizer object on tensors that are whole at their owners during the step; see [Note: owners].

The optimizer's parameters are this rank's `WholeTensor`s, in the model's shapes. Between steps they have no memory; their
states stay at the owner. For the step, the owner receives gradient and master in fp32 and sends the new master back: per
element and rank 12 bytes times (N - 1) / N^2 if optimizer states are sharded.
Alternative considered: masters that rest at the owner. That would save 4 of the 12 bytes, but weights, checkpoints and user
code that writes weights would have to deal with a second location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_dist.errors import ModelError
from hf_dist.optim.fragment import Fragment, Used, WholeTensor
from hf_dist.optim.owners import Owned, Owners, Wholes, step_whole
from hf_dist.optim.stand_in import OwnCalls, StandIn, lend, point_at
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.prepared import raw_data


class WholeStep:
    """Steps all parameters of one optimizer."""

    def __init__(self, run: Callable[[Sequence[Fragment]], None], calls: OwnCalls) -> None:
        """`run`: function that steps the optimizer on the given tensors."""
        self._run, self._calls = run, calls
        self._owners = Owners()
        self._tensors: dict[Owned, WholeTensor] = {}

    def add(self, tensors: Iterable[tuple[FlatGroup, int]]) -> list[WholeTensor]:
        """Assign owners to `tensors`; returns those that this rank owns. Raises `ModelError` for a cut tensor. Local."""
        found = []
        for group, index in tensors:
            slot = group.layout.slots[index]
            if not slot.held.everything:
                raise ModelError(
                    f"{slot.name} of shape {slot.held.whole} is cut between ranks ({slot.shape} here), and this optimizer "
                    "needs it whole. Set tensor_parallel.autotp_size and expert_parallel.autoep_size to 1, or use AdamW."
                )
            if slot.numel:
                found.append((group, index, 0, slot.shape))
        added = []
        for o in self._owners.add(found):
            if o.is_mine:
                tensor = StandIn.of(o.group.params[o.index], _nothing(o), self._calls)
                self._tensors[o] = WholeTensor(o.slot.name, tensor, o.group, o.index, 0, o.numel)
                added.append(self._tensors[o])
        return added

    @torch.no_grad()
    def step(self, used: Used) -> None:
        """Step all parameters that were used. Collective over the groups' shard axes."""
        rounds = self._owners.buckets(lambda o: o.group.grad is not None and used(o))
        if not rounds:
            self._run([])  # updates counters that do not belong to parameters
        step_whole(rounds, self._leave, self._work, self._arrive, torch.float32)

    @contextmanager
    def trial(self, tensor: Fragment) -> Iterator[None]:
        """Give `tensor` zeros as values and gradient inside the block. Local."""
        o = next(o for o, own in self._tensors.items() if own is tensor)
        point_at(tensor.tensor, _nothing(o).clone())
        lend(tensor.tensor, _nothing(o).clone())
        try:
            yield
        finally:
            lend(tensor.tensor, None)
            point_at(tensor.tensor, _nothing(o))

    def _leave(self, o: Owned) -> list[torch.Tensor]:
        assert o.group.grad is not None
        masters = o.of(o.group.source)
        return [o.of(o.group.grad).to(masters.dtype), masters.clone()]

    def _work(self, wholes: Wholes) -> dict[Owned, torch.Tensor]:
        try:
            for o, (grad, master) in wholes:
                point_at(self._tensors[o].tensor, master)
                lend(self._tensors[o].tensor, grad)
            self._run([self._tensors[o] for o, _ in wholes])
            return {o: raw_data(self._tensors[o].tensor) for o, _ in wholes}
        finally:
            for o, _ in wholes:
                lend(self._tensors[o].tensor, None)
                point_at(self._tensors[o].tensor, _nothing(o))

    def _arrive(self, o: Owned, master: torch.Tensor) -> None:
        o.of(o.group.source).copy_(master)


def _nothing(o: Owned) -> torch.Tensor:
    """Zeros in the parameter's shape with memory for one element: optimizers read shapes before they step."""
    return torch.zeros((), dtype=torch.float32, device=o.group.mesh.device).expand(o.shape)
