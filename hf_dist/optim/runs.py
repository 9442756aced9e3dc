"""Neighbouring fragments that are stepped as one: what an optimizer does once per parameter, it does once for all of them.

A flat buffer holds the parameters of a group side by side, and so do masters and gradients; when the states do as well,
an element-wise kernel does not see where one parameter ends. The optimizer is then lent the gradient of the first fragment of
each run and skips the others, as parameters without a gradient; the kernel's call is extended over the run (`fused_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.offload.host import host_zeros
from hf_dist.optim.fragment import Fragment, Used
from hf_dist.sharding.layout import ALIGNMENT

_STEP = "step"
"""Key of the one state of Adam that is not element-wise: how often the parameter was stepped, a tensor of no dimension."""


class Run:
    """Fragments of one flat buffer with equal options, whose states lie as they do."""

    def __init__(self, first: Fragment, state: dict[str, Any]) -> None:
        self.fragments = [first]
        self._states = [dict(state)]

    @property
    def first(self) -> Fragment:
        """The fragment that the optimizer sees."""
        return self.fragments[0]

    @property
    def stop(self) -> int:
        """Where the last fragment ends in the flat buffer."""
        return self.fragments[-1].stop

    def takes(self, f: Fragment, state: dict[str, Any]) -> bool:
        """Whether `f` is the next one; then it belongs to the run.

        Between two parameters of a flat buffer are less than `ALIGNMENT` elements, all zero: stepping them changes nothing.
        """
        first, began = self.first, self._states[0]
        near = f.group is first.group and 0 <= f.start - self.stop < ALIGNMENT and state.keys() == began.keys()
        if not near or _STEP not in state or not torch.equal(state[_STEP], began[_STEP]):
            return False
        for key, value in state.items():
            if key != _STEP and not (
                f.is_like(value)
                and value.dtype == began[key].dtype
                and value.data_ptr() - began[key].data_ptr() == (f.start - first.start) * value.element_size()
            ):
                return False
        self.fragments.append(f)
        self._states.append(dict(state))
        return True

    def holds(self, optimizer: torch.optim.Optimizer, used: Used) -> bool:
        """Whether it may be stepped as one: all have a gradient and the same step, and nobody put other states in the place."""
        grad = self.first.group.grad
        # Of another dtype it is lent as a copy, which does not lie beside the next one's.
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
        """Each fragment that has a gradient by itself."""
        return [Run(f, optimizer.state.get(f.tensor, {})) for f in self.fragments if used(f)]

    def stepped(self) -> None:
        """The first was stepped, and its kernel over the whole run: so were the others."""
        if len(self.fragments) > 1:
            number = self._states[0][_STEP].item()
            for state in self._states[1:]:
                state[_STEP].fill_(number)


def groups_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Which tensor is in which param group, to see whether somebody moved one since the runs were found."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def find_runs(fragments: Iterable[Fragment], optimizer: torch.optim.Optimizer) -> list[Run]:
    """All of `fragments`, in their order, in as few runs as there are."""
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
    """Move the states of each group's fragments into one buffer per key, laid out like the masters, unless they are in one."""
    places: dict[tuple[int, str, torch.dtype], list[tuple[Fragment, dict[str, Any]]]] = {}
    for f in fragments:
        state = optimizer.state.get(f.tensor, {})
        for key in (k for k, value in state.items() if f.is_like(value)):
            places.setdefault((id(f.group), key, state[key].dtype), []).append((f, state))
    for (_, key, dtype), having in places.items():
        origins = {state[key].data_ptr() - f.start * dtype.itemsize for f, state in having}
        if len(origins) > 1:
            flat = host_zeros(having[0][0].group.master.elements.numel(), dtype, pin=False)
            for f, state in having:
                state[key] = flat[f.start : f.stop].copy_(state[key])
