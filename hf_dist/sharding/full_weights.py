"""The full weights of one group: a flat buffer, and the state that it is in.

    SHARDED     the storage is freed; the guard answers for the parameters
    GATHERING   current weights are on their way into the buffer; the guard waits for them
    READABLE    current weights; the model and user code read and write them
    HIDDEN      current weights that are slices of matrices, between two forwards; the guard answers
    STALE       whole weights of before the last step; the guard waits for the next gather

`ALLOWED` has every transition, `README.md` who makes it; another one is a fault of ours and raises at once. The parameters are
guarded exactly in the states other than READABLE, so a state cannot be readable by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import nn

from hf_dist.dist.collectives import Handle
from hf_dist.sharding.guard import guard, unguard
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.user_writes import UserWrites
from hf_dist.tensors.hugepages import in_huge_pages

__all__ = ["ALLOWED", "FullWeights", "WeightState"]


class WeightState(Enum):
    """What is in the buffer."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    READABLE = "readable"
    HIDDEN = "hidden"
    STALE = "stale"


ALLOWED: dict[WeightState, frozenset[WeightState]] = {
    WeightState.SHARDED: frozenset({WeightState.GATHERING}),
    WeightState.GATHERING: frozenset({WeightState.READABLE, WeightState.SHARDED, WeightState.STALE}),
    WeightState.READABLE: frozenset({WeightState.SHARDED, WeightState.HIDDEN, WeightState.STALE}),
    WeightState.HIDDEN: frozenset({WeightState.READABLE, WeightState.STALE}),
    WeightState.STALE: frozenset({WeightState.GATHERING}),
}
"""State -> the states that may follow."""


class FullWeights:
    """All elements of one group in one buffer, of which the parameters are views."""

    def __init__(
        self, params: Sequence[nn.Parameter], layout: FlatLayout, values: torch.Tensor, *, writable: bool
    ) -> None:
        """`values`: 1D, (layout.numel,), in the dtype of use; readable. `writable`: user code may write it."""
        self.values = values
        self.writable = writable
        """Whether user code may write the weights: packed ones are read only."""
        self.state = WeightState.READABLE
        self.version = 0
        """Of the masters (`RestingWeights.version`) whose weights the buffer has, or will have after the next gather."""
        self.writes = UserWrites(params, layout, values)
        self._params = params
        self._layout = layout
        self._gather: Handle | None = None

    # ------------------------------------------------------------------ what is asked

    @property
    def is_current(self) -> bool:
        """Whether the buffer has the weights of now, or is being filled with them."""
        return self.state not in (WeightState.SHARDED, WeightState.STALE)

    @property
    def is_guarded(self) -> bool:
        """Whether the guard answers for the parameters."""
        return self.state is not WeightState.READABLE

    @property
    def is_allocated(self) -> bool:
        """Whether the buffer has memory."""
        return self._layout.numel == 0 or self.values.untyped_storage().nbytes() > 0

    def view(self, index: int) -> torch.Tensor:
        """The elements of parameter `index`, in its shape."""
        slot = self._layout.slots[index]
        return self.values[slot.offset : slot.stop].view(slot.shape)

    # ------------------------------------------------------------------ transitions

    def gather(self, fill: Callable[[], Handle]) -> None:
        """SHARDED or STALE -> GATHERING: allocate the buffer and start `fill`. As collective as `fill` is."""
        # Autograd saved views of the buffer with this version: a gather for backward writes the same values again.
        with torch.autograd._unsafe_preserve_version_counter(self.values), torch.no_grad():
            if not self.is_allocated:
                # Not a new tensor: the parameters, and what autograd saved of the forward, are views of this storage.
                self.values.untyped_storage().resize_(self._layout.numel * self.values.element_size())
                in_huge_pages(self.values)
            handle = fill()
        # After `fill`: if it raises (a file, a rank that is gone), the weights are as they were, and guarded.
        self._become(WeightState.GATHERING)
        self._gather = handle

    def wait(self) -> None:
        """GATHERING or HIDDEN -> READABLE: weights that nobody gathers are not waited for. Local."""
        if self.state is not WeightState.READABLE:
            self.drain()
            self._become(WeightState.READABLE)
            if self.writable:  # from here on user code can reach the elements, and its writes count
                self.writes.watch()

    def hide(self) -> None:
        """READABLE -> HIDDEN. Local."""
        if self.state is WeightState.READABLE:
            self._become(WeightState.HIDDEN)

    def outdate(self) -> None:
        """Any -> STALE: the masters were stepped, and the buffer rests. Local."""
        if self.state is not WeightState.STALE:
            self.drain()  # it was issued with the masters of before, and would overwrite what is gathered next
            self._become(WeightState.STALE)

    def free(self) -> None:
        """GATHERING or READABLE -> SHARDED. Local."""
        if self.state is not WeightState.SHARDED:
            self.drain()
            self._become(WeightState.SHARDED)
        with torch.autograd._unsafe_preserve_version_counter(self.values):
            self.values.untyped_storage().resize_(0)

    def drain(self) -> None:
        """Wait for a gather, whose weights nobody reads. Local.

        A collective still writes into the buffer, and half of a transfer must not stay behind.
        """
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def _become(self, state: WeightState) -> None:
        assert state in ALLOWED[self.state], f"{self._layout.slots[0].name}: {self.state.value} -> {state.value}"
        was_guarded, self.state = self.is_guarded, state
        if was_guarded != self.is_guarded:
            for p in (*self._params, *self.writes.aliases):
                (guard if self.is_guarded else unguard)(p)
