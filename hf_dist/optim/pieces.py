"""Adam's fused CPU kernel in pieces: each is cast into the weights that are gathered while it is still in the cache.

The optimizer's own `step` runs, with its hooks; only the kernel call that it ends in is taken apart, so the bits are the same.
A pass of its own over the masters reads 4 bytes per element again, of 34 (50M parameters, one thread: 4 to 6% of the step).
Fragments of one group that lie side by side, states included, are one call: a call per parameter cost 6% of the step (48
parameters of a million elements).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.offload.host import host_zeros
from hf_dist.offload.store import Tier
from hf_dist.optim.fragment import Fragment
from hf_dist.optim.step_batch import StepBatch
from hf_dist.sharding.layout import ALIGNMENT

_PIECE = 1 << 19
"""Elements per thread. Four fp32 arrays of them are 8 MB; with fewer the calls cost more than the cache saves."""
_KERNELS: dict[Any, Any] = {
    getattr(operator, overload): function
    for operator, function in (
        (torch.ops.aten._fused_adam_, torch._fused_adam_),
        (torch.ops.aten._fused_adamw_, torch._fused_adamw_),
    )
    for overload in ("default", "tensor_lr")
}
"""What the dispatcher sees -> what is called in its place: reading the arguments of an operator's object takes longer."""
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
    if mode.scattered:
        _gather_states(batch, optimizer)


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
        self.scattered = False
        """Neighbouring fragments could not be one call because of where their states are."""
        self._fragments = {f.tensor.data_ptr(): f for f in fragments}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KERNELS:
            return func(*args, **(kwargs or {}))
        self.called = True
        kernel = _KERNELS[func]
        *lists, steps = args[:_LISTS]
        numel = _PIECE * torch.get_num_threads()  # the cast is shared among the threads as the step was
        for f, stop, step, tensors in self._runs(list(zip(*filter(None, lists), strict=True)), steps):
            deliver = f.group.storage.link.deliver
            whole = (f.group.shard.get()[f.start : stop], *(_extended(t, stop - f.start) for t in tensors))
            small = stop - f.start <= numel
            for into, *piece in [whole] if small else zip(*(t.split(numel) for t in whole), strict=True):
                given = [[t] for t in piece] + [[]] * (_LISTS - 1 - len(piece))
                kernel(*given, [step], *args[_LISTS:], **kwargs)
                deliver(into, piece[0])
        return None

    def _runs(self, rows: list[tuple[torch.Tensor, ...]], steps: list[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        """(first fragment, where the last one stops, step, tensors of the first) of fragments that are one interval.

        Between two parameters of a flat buffer are less than `ALIGNMENT` elements, all zero: stepping them changes nothing.
        """
        addresses = [[t.data_ptr() for t in row] for row in rows]
        first, step, began, origin = self._fragments[addresses[0][0]], steps[0], rows[0], addresses[0]
        stop, number = first.stop, step.item()
        for row, its_step, address in zip(rows[1:], steps[1:], addresses[1:], strict=True):
            f = self._fragments[address[0]]
            if f.group is first.group and 0 <= f.start - stop < ALIGNMENT and its_step.item() == number:
                apart = (f.start - first.start) * 4
                places = [b - a == apart for a, b in zip(origin, address, strict=True)]
                if all(places):
                    stop = f.stop
                    continue
                self.scattered |= all(places[:2])
            yield first, stop, step, began
            first, stop, step, began, origin, number = f, f.stop, its_step, row, address, its_step.item()
        yield first, stop, step, began


def _extended(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """`numel` elements from where the 1-D `tensor` begins."""
    return tensor.detach().as_strided((numel,), (1,))


def _gather_states(batch: StepBatch, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's states lie one after another, as the masters do: then neighbours are one call from now on."""
    for group in batch.groups:
        own = [(f, optimizer.state.get(f.tensor, {})) for f in batch.fragments if f.group is group]
        keys = {key: value.dtype for f, state in own for key, value in state.items() if f.is_like(value)}
        for key, dtype in keys.items():
            flat = host_zeros(group.master.elements.numel(), dtype, pin=False)
            for f, state in own:
                if f.is_like(state.get(key)):
                    state[key] = flat[f.start : f.stop].copy_(state[key])
