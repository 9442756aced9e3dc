"""Runs of adjacent fragments that are stepped as one, so that the optimizer's work per parameter is done once per run.

Flat buffers hold the weights, masters and gradients of a group's parameters side by side. If the states are also side by side,
an element-wise kernel need not know where one parameter ends. The optimizer then gets only the gradient of each run's first
fragment and skips the others as parameters without a gradient; `fused_kernel.py` extends the kernel call over the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.memory.offload.host import host_zeros
from hf_dist.optim.fragment import Fragment, Used

_STEP = "step"
"""Key of Adam's only state that is not element-wise: the step counter, a 0-D tensor."""


class Run:
    """Adjacent fragments of one flat buffer with equal options and equally adjacent states."""

    def __init__(self, first: Fragment, state: dict[str, Any]) -> None:
        self.fragments = [first]
        self._states = [dict(state)]

    @property
    def first(self) -> Fragment:
        """The fragment that the optimizer sees."""
        return self.fragments[0]

    @property
    def stop(self) -> int:
        """End of the last fragment in the flat buffer."""
        return self.fragments[-1].stop

    def takes(self, f: Fragment, state: dict[str, Any]) -> bool:
        """Add `f` to the run if it is the next fragment; returns whether it was.

        Fewer than `FlatLayout.alignment` elements, all zero, separate two parameters of a flat buffer: to step them changes
        nothing.
        """
        first, began = self.first, self._states[0]
        near = (
            f.group is first.group
            and 0 <= f.start - self.stop < f.group.layout.alignment
            and state.keys() == began.keys()
        )
        if not near or _STEP not in state or not torch.equal(state[_STEP], began[_STEP]):
            return False
        for key, value in state.items():
            if key != _STEP and not (
                f.is_like(value)
                and value.dtype == began[key].dtype
                and _memory(value) == _memory(began[key])
                and value.storage_offset() - began[key].storage_offset() == f.start - first.start
            ):
                return False
        self.fragments.append(f)
        self._states.append(dict(state))
        return True

    def holds(self, optimizer: torch.optim.Optimizer, used: Used) -> bool:
        """Whether the run can be stepped as one: all fragments have gradients, equal steps, and their known state tensors."""
        grad = self.first.group.grad
        # A gradient of another dtype is lent as a copy, which is not adjacent to the next one's.
        if grad is None or grad.dtype != self.first.tensor.dtype:
            return False
        step = None
        for f, known in zip(self.fragments, self._states, strict=True):
            state = optimizer.state.get(f.tensor, {})
            if not used(f) or len(state) != len(known) or any(state.get(k) is not v for k, v in known.items()):
                return False
            number = known[_STEP].item() if _STEP in known else 0
            if step is not None and number != step:
                return False
            step = number
        return True

    def apart(self, optimizer: torch.optim.Optimizer, used: Used) -> list[Run]:
        """A separate run for each fragment that has a gradient."""
        return [Run(f, optimizer.state.get(f.tensor, {})) for f in self.fragments if used(f)]

    def stepped(self) -> None:
        """After the kernel has stepped the whole run: copy the first fragment's step counter to the others."""
        if len(self.fragments) > 1:
            number = self._states[0][_STEP].item()
            for state in self._states[1:]:
                state[_STEP].fill_(number)


def _memory(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage. Two storages can lie side by side by chance; a view over both is an error."""
    return tensor.untyped_storage().data_ptr()


def groups_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """ids of the tensors in each param group, to detect that user code moved one since the runs were found."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def find_runs(fragments: Iterable[Fragment], optimizer: torch.optim.Optimizer) -> list[Run]:
    """Combine `fragments`, in order, into as few runs as possible."""
    options = {tensor: i for i, group in enumerate(groups_of(optimizer)) for tensor in group}
    runs: list[Run] = []
    last = None
    for f in fragments:
        state = optimizer.state.get(f.tensor, {})
        own = options.get(id(f.tensor))
        if not runs or own != last or not runs[-1].takes(f, state):
            runs.append(Run(f, state))
        last = own
    return runs


def lay_side_by_side(fragments: Iterable[Fragment], optimizer: torch.optim.Optimizer) -> None:
    """Move the states of each group's fragments into one buffer per key, laid out like the masters, unless already there."""
    places: dict[tuple[int, str, torch.dtype], list[tuple[Fragment, dict[str, Any]]]] = {}
    for f in fragments:
        state = optimizer.state.get(f.tensor, {})
        for key in (k for k, value in state.items() if f.is_like(value)):
            places.setdefault((id(f.group), key, state[key].dtype), []).append((f, state))
    for (_, key, dtype), having in places.items():
        origins = {(_memory(state[key]), state[key].storage_offset() - f.start) for f, state in having}
        if len(origins) > 1:
            flat = host_zeros(having[0][0].group.master.elements.numel(), dtype, pin=False)
            for f, state in having:
                state[key] = flat[f.start : f.stop].copy_(state[key])
