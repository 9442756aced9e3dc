"""Runs Adam's fused CPU kernel in pieces: each piece is cast into the all-gather's input while it is still in the cache.

The optimizer's own `step` runs, with its hooks. Only its final kernel call is split, so results are bitwise the same. A
separate pass over the masters would read 4 bytes per element again, of 34 (50M parameters, one thread: 4 to 6% of the step).
Adjacent fragments with adjacent states share one call (`runs.py`): one call per parameter cost 6% of the step (48 parameters
of a million elements).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.memory.offload.resting import Tier
from hf_dist.optim.fragment import Used, lent
from hf_dist.optim.raw_calls import watched
from hf_dist.optim.runs import Run, find_runs, groups_of, lay_side_by_side
from hf_dist.optim.step_batch import StepBatch

_PIECE = 1 << 19
"""Elements per thread and piece. Four fp32 arrays of this size are 8 MB; with fewer, calls cost more than the cache saves."""
_KERNELS: dict[object, Any] = {
    getattr(operator, overload): function
    for operator, function in (
        (torch.ops.aten._fused_adam_, torch._fused_adam_),
        (torch.ops.aten._fused_adamw_, torch._fused_adamw_),
    )
    for overload in ("default", "tensor_lr")
}
"""Operator that the dispatcher sees -> function called in its place, whose arguments are parsed faster."""
_LISTS = 6
"""Number of list arguments of the kernels: weights, gradients, two states, a state's maximum (AMSGrad), step counters."""


@contextmanager
def handed_on(batch: StepBatch, optimizer: torch.optim.Optimizer, used: Used) -> Iterator[None]:
    """Lend gradients for a step of `optimizer` inside; afterwards copy masters to weights and states to their tier. Local."""
    if not _applies(batch, optimizer):
        with lent(f for f in batch.fragments if used(f)):
            yield
        batch.swap_out(optimizer)
        return
    options = groups_of(optimizer)
    if batch.options != options:
        batch.runs = None
    # Separate runs until the kernel was seen once: a later torch may use another kernel.
    runs = batch.runs or [Run(f, optimizer.state.get(f.tensor, {})) for f in batch.fragments]
    holds = [run.holds(optimizer, used) for run in runs]
    parts = [
        p for run, whole in zip(runs, holds, strict=True) for p in ([run] if whole else run.apart(optimizer, used))
    ]
    with lent(run.first for run in parts), _InPieces(parts) as mode:
        yield
    if not mode.called:  # no weight had a gradient, or a later torch uses another kernel
        assert all(len(run.fragments) == 1 for run in parts), "only the first parameter of each run was stepped"
        batch.swap_out(optimizer)
    for run in parts:
        run.stepped()
    if mode.called and (batch.runs is None or not all(holds)):
        lay_side_by_side(batch.fragments, optimizer)
        batch.runs, batch.options = find_runs(batch.fragments, optimizer), options


def _applies(batch: StepBatch, optimizer: torch.optim.Optimizer) -> bool:
    """Whether no hook observes the step, nothing writes masters after the kernel, and weights are a separate copy in memory."""
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not watched(optimizer)
    return (
        plain
        and batch.in_place
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(g.master.tier is not Tier.DISK and g.master.get().device.type == "cpu" for g in batch.groups)
        and all(g.rest.shard is not g.master and g.rest.shard.tier is not Tier.DISK for g in batch.groups)
    )


class _InPieces(TorchDispatchMode):
    def __init__(self, runs: list[Run]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called = False
        self._runs = {run.first.tensor.data_ptr(): run for run in runs}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func not in _KERNELS:
            return func(*args, **(kwargs or {}))
        self.called = True
        kernel = _KERNELS[func]
        *lists, steps = args[:_LISTS]
        numel = _PIECE * torch.get_num_threads()  # the cast is divided among threads like the step
        for *tensors, step in zip(*filter(None, lists), steps, strict=True):
            run = self._runs[tensors[0].data_ptr()]
            f, length = run.first, run.stop - run.first.start
            deliver = f.group.rest.storage.link.deliver
            weights = f.group.rest.own(f.group.rest.shard.get())
            whole = (weights[f.start : run.stop], *(_extended(t, length) for t in tensors))
            for into, *piece in [whole] if length <= numel else zip(*(t.split(numel) for t in whole), strict=True):
                given = [[t] for t in piece] + [[]] * (_LISTS - 1 - len(piece))
                kernel(*given, [step], *args[_LISTS:], **kwargs)
                deliver(into, piece[0])
        return None


def _extended(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """A view of `numel` elements from the start of the 1-D `tensor`."""
    return tensor.detach().as_strided((numel,), (1,))
