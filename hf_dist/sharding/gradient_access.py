"""Reading and writing `p.grad` of a prepared parameter, whose gradient is stored in the flat buffers of its group."""

from __future__ import annotations

import weakref

import torch

from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.sharding.gradient_shard import GradientShard
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.group_axes import Combination
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.moments import Listener
from hf_dist.sharding.prepared import raw_grad, set_raw_grad
from hf_dist.sharding.reducer import Reducer


class GroupAccess:
    """The gradients of one group as user code sees them."""

    def __init__(self, group: FlatGroup, reducer: Reducer, listener: Listener) -> None:
        """`reducer`: fills the gradient of `group`; `listener`: told before user code gets it. Held weakly."""
        self._of = weakref.ref(group)
        self._by = weakref.ref(reducer)
        self._listener = listener
        self._index = {id(p): i for i, p in enumerate(group.params)}

    @property
    def _group(self) -> FlatGroup:
        group = self._of()
        assert group is not None, "a group outlives what it owns"
        return group

    def gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """This rank's view of one parameter's gradient, as accumulated in the window so far. Local.

        At stages 0 and 1 it is this rank's own sum before the last microbatch, as inside DDP's `no_sync`. After that it is the
        mean over the data ranks, times the fp16 loss scale until it is clipped. A rank that keeps only a part of the gradient
        gets a `GradientShard`.
        """
        group, index = self._group, self._index[id(param)]
        waiting = raw_grad(param)
        if waiting is None:
            waiting = group.window.of(index)
        if waiting is not None:
            return waiting
        self._drain()
        values, held = group.gradient_now
        if values is None:
            return None
        slot = group.layout.slots[index]
        start, stop = slot.within(*held)
        own = values[start:stop]
        axes, shares = group.axes, held != (0, group.layout.numel)
        if shares or axes.parts is not None or group.mesh.model.size > 1:
            # A loop on a pipeline rank sees only the parameters of its stages, so its norms would cover a part of the model.
            axis = self._holders(held) if shares else axes.parts
            axis = axis if group.mesh.model.size == 1 else None
            return GradientShard.of(own, torch.Size(slot.shape), axis, slot.name)
        alone = group.mesh.world.size == 1
        return None if alone and not group.window.used[index] else own.view(slot.shape)

    def _holders(self, held: tuple[int, int]) -> MeshAxis:
        """The ranks that together have all of a gradient of which this rank has the interval `held`."""
        axes = self._group.axes
        if held == self._group.resting:
            return axes.whole or axes.shard
        # The sum of this copy alone. Slices of experts are on the ranks of `shard`, too.
        return axes.shard if axes.parts is None else self._group.mesh.shard

    def set_gradient(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """Implements `p.grad = value`: a tensor of the parameter's shape, or None for no gradient. Local.

        Every rank sets the same value and keeps its part. Raises `ModelError` for another shape.
        """
        group, index = self._group, self._index[id(param)]
        slot = group.layout.slots[index]
        if value is None:
            self._drain()
            group.zero_gradient(index)
            return
        if isinstance(value, GradientShard):  # `p.grad *= 0.5` assigns its result, which was computed in place
            return
        if tuple(value.shape) != tuple(slot.shape):
            raise ModelError(
                f"p.grad of {slot.name} was set to a tensor of shape {tuple(value.shape)}, but the parameter has {slot.shape}"
            )
        now = self.gradient_of(param)
        if now is None:
            set_raw_grad(param, value.detach().to(param.dtype))  # `adopt` finds it
        elif isinstance(now, GradientShard):
            self._store(slot, value)
        elif now.data_ptr() != value.data_ptr():
            now.copy_(value)
        group.window.used[index] = True

    @torch.no_grad()
    def adopt(self) -> None:
        """Add gradients that user code assigned to `p.grad` without a backward to the window. Local."""
        group = self._group
        for index, (slot, p) in enumerate(zip(group.layout.slots, group.params, strict=True)):
            value = raw_grad(p)
            if value is not None:
                set_raw_grad(p, None)
                self._store(slot, value)
                group.window.used[index] = True

    def to_combine(self) -> list[Combination]:
        """The combinations that these gradients still await at the end of the window. Local."""
        reducer = self._by()
        return [] if reducer is None else reducer.to_combine(self._group)

    def _drain(self) -> None:
        """Wait for all transfers into the gradient. Local."""
        reducer = self._by()
        if reducer is not None:
            reducer.drain()
            self._listener.now.before_gradient_access()

    @torch.no_grad()
    def whole(self, param: torch.Tensor) -> torch.Tensor | None:
        """An fp32 tensor of the parameter's shape: this rank's part of the reduced gradient, zero elsewhere. Local."""
        group = self._group
        self._drain()
        values, held = group.gradient_now
        if values is None:
            return None
        slot = group.layout.slots[self._index[id(param)]]
        first, last = slot.within(*held)
        origin = held[0] + first - slot.offset
        full = torch.zeros(slot.numel, dtype=torch.float32, device=group.mesh.device)
        full[origin : origin + last - first] = values[first:last].to(full)
        return full.view(slot.shape)

    def _store(self, slot: ParamSlot, value: torch.Tensor) -> None:
        group = self._group
        values, (start, stop) = group.gradient_now
        if values is None:
            own = group.keeps_own
            start, stop = group.at_rest.awaited if own and group.awaiting is not None else (start, stop)
            zeros = torch.zeros(stop - start, dtype=group.precision.reduced, device=group.mesh.device)
            (group.sums if own else group.gradient).add(zeros)
            group.rest.storage.link.wait_host()
            values, _ = group.gradient_now
        assert values is not None
        first, last = slot.within(start, stop)
        origin = start + first - slot.offset
        values[first:last].copy_(value.detach().reshape(-1)[origin : origin + last - first])
