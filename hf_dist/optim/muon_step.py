"""Muon on sharded matrices: momentum stays sharded; only the matrix to orthogonalise is sent to its owner and back.

Newton-Schulz rounds its input to bf16 and returns bf16, so sending bf16 loses nothing: with equal gradients, the weights are
bitwise those of torch.optim.Muon in one process. Matrices are divided among the ranks by cost, instead of every rank computing
all of them ([Note: owners]). `"ns_dtype": "fp32"` iterates and sends in fp32: gradients of several ranks differ from one
process's in the last bit, which bf16 amplifies to a percent of a matrix's update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hf_dist.errors import ModelError
from hf_dist.optim.fragment import Fragment, OfParameter, Used
from hf_dist.optim.muon import (
    MOMENTUM,
    apply,
    iterates_in,
    matrix_shape,
    newton_schulz_cost,
    orthogonalised,
    with_momentum,
)
from hf_dist.optim.owners import Owned, Owners, Wholes, step_whole
from hf_dist.sharding.group import FlatGroup


class MuonStep:
    """Steps the matrices of one optimizer. Its other parameters are stepped element-wise elsewhere."""

    def __init__(self, optimizer: torch.optim.Optimizer, fragments: Mapping[tuple[int, int], Fragment]) -> None:
        """`fragments`: this rank's, by (id of the group, index)."""
        self._optimizer, self._fragments = optimizer, fragments
        self._owners = Owners(newton_schulz_cost)
        self._numbers: dict[tuple[int, int], int] = {}  # number of the param group

    def add(self, number: int, tensors: Iterable[tuple[FlatGroup, int]]) -> None:
        """Add the parameters of param group `number`. Raises `ModelError` for a matrix that is cut into slices. Local."""
        if not self._optimizer.param_groups[number].get("use_muon", True):
            return
        found = []
        for group, index in tensors:
            held = group.layout.slots[index].held
            if held.shape[-2:] != held.whole[-2:] or (len(held.shape) != 3 and not held.everything):
                raise ModelError(
                    f"Muon: {group.layout.slots[index].name} of shape {held.whole} is cut between ranks ({held.shape} here), "
                    "and its update needs the whole matrix. Set tensor_parallel.autotp_size to 1, or use AdamW."
                )
            if group.axes.outer and group.axes.parts is not None:
                raise ModelError(
                    f'hf_dist.optimizer_over is "all", and {group.layout.slots[index].name} is spread over expert_parallel: '
                    "Muon sends a matrix to one of the ranks that hold parts of it, and these have no group of their own. "
                    "Remove the key, or use AdamW."
                )
            count, rows, columns = matrix_shape(held.shape)
            self._numbers[id(group), index] = number
            found += [(group, index, k * rows * columns, (rows, columns)) for k in range(count)]
        self._owners.add(found)

    def takes(self, f: OfParameter) -> bool:
        """Whether `f` belongs to a matrix."""
        return (id(f.group), f.index) in self._numbers

    @torch.no_grad()
    def step(self, used: Used) -> None:
        """Update momentum, orthogonalise at the owners, step weights. Collective over the groups' shard axes."""
        ready = {o for o in self._owners.items if o.group.grad is not None and used(o)}
        for dtype in (torch.bfloat16, torch.float32):
            own = {o for o in ready if iterates_in(self._options(o)) is dtype}
            step_whole(self._owners.buckets(own.__contains__), self._leave, self._work, self._arrive, dtype)

    def _options(self, o: Owned) -> dict[str, object]:
        return self._optimizer.param_groups[self._numbers[id(o.group), o.index]]

    def _leave(self, o: Owned) -> list[torch.Tensor]:
        options, fragment = self._options(o), self._fragments.get((id(o.group), o.index))
        grads = o.group.grad
        assert grads is not None
        if fragment is None:
            return [torch.empty(0, dtype=iterates_in(options), device=grads.device)]
        state = self._optimizer.state[fragment.tensor]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(fragment.tensor)
        grad = o.of(grads).to(fragment.tensor.dtype)
        return [with_momentum(grad, o.of(state[MOMENTUM], fragment.start), options)]

    def _work(self, wholes: Wholes) -> dict[Owned, torch.Tensor]:
        return {o: orthogonalised(matrix, self._options(o)) for o, (matrix,) in wholes}

    def _arrive(self, o: Owned, update: torch.Tensor) -> None:
        weights = o.of(o.group.source)
        apply(weights, update.to(weights.device), self._options(o), *o.shape)
