"""Adam's fused CPU kernel in pieces: each is cast into the weights that are gathered while it is still in the cache.

The optimizer's own `step` runs, with its hooks; only the kernel call that it ends in is taken apart, so the bits are the same.
A pass of its own over the masters reads 4 bytes per element again, of 34 (50M parameters, one thread: 4 to 6% of the step).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.offload.store import Tier
from hf_dist.optim.fragment import Fragment
from hf_dist.optim.step_batch import StepBatch

_PIECE = 1 << 20
"""Elements per thread. Four fp32 arrays of them are 16 MB; with fewer the calls cost more than the cache saves."""
_KERNELS = frozenset(
    getattr(kernel, overload)
    for kernel in (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_)
    for overload in ("default", "tensor_lr")
)
_LISTS = 6
"""The first arguments of the kernels: weights, gradients, two states, the maximum of one (AMSGrad), step counters."""


@contextmanager
def handed_on(batch: StepBatch, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Step `optimizer` inside; afterwards weights follow the masters of `batch`, and states go where they rest."""
    if not _applies(batch, optimizer):
        yield
        batch.swap_out(optimizer)
        return
    with _InPieces(batch.fragments) as mode:
        yield
    if not mode.called:  # no weight had a gradient, or a later torch steps by another kernel
        batch.swap_out(optimizer)


def _applies(batch: StepBatch, optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing touches the masters after the kernel, and every one is cast into something else in memory."""
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not optimizer._optimizer_step_post_hooks
    return (
        plain
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(g.master.tier is not Tier.DISK and g.master.get().device.type == "cpu" for g in batch.groups)
        and all(g.shard is not g.master and g.shard.tier is not Tier.DISK for g in batch.groups)
    )


class _InPieces(TorchDispatchMode):
    def __init__(self, fragments: list[Fragment]) -> None:
        super().__init__()
        self.called = False
        self._fragments = {f.tensor.data_ptr(): f for f in fragments}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KERNELS:
            return func(*args, **(kwargs or {}))
        self.called = True
        *lists, steps = args[:_LISTS]
        numel = _PIECE * torch.get_num_threads()  # the cast is shared among the threads as the step was
        for weights, step, *others in zip(lists[0], steps, *filter(None, lists[1:]), strict=True):
            f = self._fragments[weights.data_ptr()]
            deliver = f.group.storage.link.deliver
            tensors = (f.group.shard.get()[f.start : f.stop], weights, *others)
            small = f.stop - f.start <= numel
            for into, *piece in [tensors] if small else zip(*(t.split(numel) for t in tensors), strict=True):
                given = [[t] for t in piece] + [[]] * (_LISTS - 1 - len(piece))
                func(*given, [step], *args[_LISTS:], **kwargs)
                deliver(into, piece[0])
        return None
