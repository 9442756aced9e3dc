"""This rank's gradient of a window before reduction: in `.grad` where autograd accumulates it, else in a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.prepared import raw_grad, set_raw_grad
from hf_dist.tensors.hugepages import in_huge_pages


class WindowGradient:
    """The gradients of one group's parameters on this rank. Local: the group reduces what `take` returns."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        device: torch.device,
        *,
        accumulated: torch.dtype,
        wire: torch.dtype,
        divisor: int = 1,
    ) -> None:
        """`accumulated`: dtype in which microbatches are summed. `wire`: dtype of the result of `take`. `divisor`: divides
        each gradient as it is moved into the flat buffer."""
        self.used = [False] * len(params)
        """Which parameters had a gradient in this window, on this rank until `FlatGroup.combine` merges the stages' lists."""
        self.values: torch.Tensor | None = None
        """The flat buffer, 1-D over the whole layout; None until a gradient is moved into it."""
        self._params, self._layout, self._device = params, layout, device
        self._accumulated, self._wire = accumulated, wire
        self._factor = 1.0 / divisor
        self._filled = [False] * len(params)  # slots of `values` that hold a gradient
        self._in_place = False
        """Whether gradients may wait in `.grad`: those of earlier microbatches, or those without room for a buffer."""
        self._reduces_now = True
        self._gaps = self._gap_index()
        self._end = max((slot.stop for slot in layout.slots if slot.numel), default=0)  # only padding follows

    def _gap_index(self) -> torch.Tensor | None:
        # Excludes the padding at the end: up to 64 elements per rank, each of which would take an 8-byte index.
        gaps = [torch.arange(a, b) for a, b in self._layout.gaps() if b < self._layout.numel]
        return torch.cat(gaps).to(self._device) if gaps else None

    def begin_backward(self, reduces: bool, dtype: torch.dtype) -> bool:
        """Call before a backward whose gradients have `dtype`; `reduces`: a reduction follows it.

        Returns whether gradients stay in `.grad`, where autograd accumulates them.
        """
        self._reduces_now = reduces
        in_place = not reduces and dtype == self._accumulated
        self._in_place |= in_place
        return in_place

    def add(self, index: int, *, has_room: bool = True) -> None:
        """Move `.grad` of parameter `index` into the flat buffer, after autograd has accumulated it.

        Without room for a buffer, the gradient stays in `.grad`, in the dtype of the weights, until `take`.
        """
        p = self._params[index]
        grad = raw_grad(p)
        if grad is None:
            return
        self.used[index] = True
        if not self._reduces_now and grad.dtype == self._accumulated:
            return  # autograd adds the next microbatch to `.grad` itself, in the dtype of the sum: a buffer would be a copy
        if self.values is None and self._reduces_now and not has_room:
            self._in_place = True
            return
        if grad.is_sparse:  # embeddings with `sparse=True`; ranks have other rows, so only dense ones can be summed
            grad = grad.to_dense()
        if self._is_whole_buffer(grad):  # it serves as the buffer: a copy would take its memory once more
            self.values = grad.detach().view(-1)
            if self._factor != 1.0:
                self.values.mul_(self._factor)
        else:
            slot = self._layout.slots[index]
            into = self._buffer()[slot.offset : slot.stop].view(slot.shape)
            if self._filled[index]:
                into.add_(grad, alpha=self._factor)
            else:
                self._put(into, grad)
        self._filled[index] = True
        # Or autograd would add the next microbatch to what is already in the buffer, and `take` would count it twice.
        set_raw_grad(p, None)

    def _is_whole_buffer(self, grad: torch.Tensor) -> bool:
        # Of the layout's length: with padding behind it the reduce-scatter would read past its end.
        same = grad.numel() == self._layout.numel and grad.dtype == self._buffer_dtype and grad.device == self._device
        return self.values is None and len(self._params) == 1 and same and grad.is_contiguous()

    def _put(self, into: torch.Tensor, grad: torch.Tensor) -> None:
        if self._factor == 1.0:
            into.copy_(grad)
        else:  # one kernel scales and copies
            torch.mul(grad, self._factor, out=into)

    @property
    def has_some(self) -> bool:
        """Whether gradients are waiting for `take`."""
        return self.values is not None or self._in_place

    def of(self, index: int) -> torch.Tensor | None:
        """The gradient of parameter `index` in the flat buffer, in the parameter's shape; None if there is none. Local."""
        if self.values is None or not self._filled[index]:
            return None
        slot = self._layout.slots[index]
        return self.values[slot.offset : slot.stop].view(slot.shape)

    def forget(self, index: int) -> None:
        """Discard the gradient of parameter `index`. Local."""
        set_raw_grad(self._params[index], None)
        self.used[index] = False
        self._filled[index] = False

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor`. Local."""
        for i, p in enumerate(self._params):
            waiting = raw_grad(p) if self._in_place else None
            for values in (waiting, self.of(i)):
                if values is not None:
                    values.mul_(factor)

    @property
    def _buffer_dtype(self) -> torch.dtype:
        return self._wire if self._reduces_now else self._accumulated

    def _buffer(self) -> torch.Tensor:
        """`values`, allocated if None: zero between the slots, uninitialised in them."""
        if self.values is None:
            self.values = in_huge_pages(torch.empty(self._layout.numel, dtype=self._buffer_dtype, device=self._device))
            if self._gaps is not None:
                self.values.index_fill_(0, self._gaps, 0)
            if self._end < self.values.numel():
                self.values[self._end :].zero_()
            self._filled = [False] * len(self._params)  # their elements are whatever the memory held
        return self.values

    def take(self) -> torch.Tensor:
        """Hand over the whole gradient of this rank: 1-D, wire dtype, zero where a parameter has no gradient."""
        values = self._buffer()
        for i, (slot, p) in enumerate(zip(self._layout.slots, self._params, strict=True)):
            if self._filled[i]:
                continue
            into = values[slot.offset : slot.stop].view(slot.shape)
            waiting = raw_grad(p) if self._in_place else None
            if waiting is not None:  # from an earlier microbatch that used the parameter, or for lack of room
                self._put(into, waiting.to_dense() if waiting.is_sparse else waiting)
                set_raw_grad(p, None)
                self.used[i] = True
            else:  # unused on this rank, and perhaps not on others: the sum over ranks needs a number from each
                into.zero_()
        self._in_place = False
        self.values = None
        return values.to(self._wire)

    def drop(self, set_to_none: bool = True) -> None:
        """End the window: forget unreduced gradients and `used`; without `set_to_none`, `used` parameters stay so."""
        self.values = None
        self._in_place = False
        for i, p in enumerate(self._params):
            self.used[i] = not set_to_none and (self.used[i] or raw_grad(p) is not None)
            set_raw_grad(p, None)
