"""A sharded model: its units, and the operations on all of them between two passes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager

from torch import nn

from hf_dist.dist.mesh import ParallelMesh
from hf_dist.memory.offload.resting import Tier
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.comm_limits import InFlightLimits
from hf_dist.sharding.counts import count_whole
from hf_dist.sharding.gradient_access import GroupAccess
from hf_dist.sharding.group_axes import axes_by_name, held_between_stages
from hf_dist.sharding.guard import check_still_frozen, refuse_moves
from hf_dist.sharding.hooks import Passes
from hf_dist.sharding.model_ref import Remains
from hf_dist.sharding.moments import Listener
from hf_dist.sharding.ownership import keep_shards
from hf_dist.sharding.param_slice import cut_along
from hf_dist.sharding.pipeline_share import PipelineShare
from hf_dist.sharding.placement import Placement, StatePlacements, Stay
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.prefetch import Prefetch
from hf_dist.sharding.reducer import Reducer
from hf_dist.sharding.sliced_share import SlicedShare
from hf_dist.sharding.unit import ShardUnit
from hf_dist.sharding.units import LeafModules, build_units, containers


class ShardedModel:
    """The units of one model and the operations on all of them after a window. The model itself is never wrapped."""

    def __init__(
        self,
        model: nn.Module,
        *,
        placements: StatePlacements,
        mesh: ParallelMesh,
        precision: Precision,
        limits: InFlightLimits | None = None,
        leaf_modules: LeafModules = ((), (), ()),
        pipeline: PipelineShare | None = None,
        sliced: SlicedShare | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Shard `model` in place. Collective: every rank of the mesh calls it with the same model.

        `limits`: elements in flight; `leaf_modules`: class names, module names and name endings of further units; `pipeline`:
        the pipeline stages that this rank runs (`model` then has only their parameters); `sliced`: the share of a model that
        is cut along `tp`; `storage`: where states rest (default: all on the device).
        """
        self.mesh = mesh
        self.placements = placements
        self.precision = precision
        self.limits = limits or InFlightLimits()
        self.pipeline = pipeline
        self.sliced = sliced
        self.storage = storage or Storage(mesh.device)
        cuts = {name: along for name, p in model.named_parameters() if (along := cut_along(p))}
        second = mesh.neighbours(placements.second)
        holders = pipeline.holders if pipeline else {}
        more = {name: list(rows) for name, rows in (sliced.copies if sliced else {}).items()}
        for name, axis in holders.items():
            more.setdefault(name, []).append(held_between_stages(axis))
        hops = mesh.hops(placements.wires.machine) if placements.wires.gradients is not None else None
        axes = axes_by_name(mesh, more, cuts, second, placements.copies, hops)
        self.units = build_units(model, placements, mesh, precision, self.storage, leaf_modules, axes, sliced)
        self.groups = [group for unit in self.units for group in unit.groups]
        """All of them, unit by unit."""
        self.trainable_groups = [group for group in self.groups if group.trainable]
        """Those whose parameters are trained."""
        self._remains = Remains(containers(model, self.units))
        self.root = self.units[0]
        if sliced is not None:
            for group in self.groups:
                if group.share is not None:
                    sliced.groups.add(id(group))
                    group.reshard()
        self.listener = Listener()
        """Told of the moments of every pass; the engine connects itself."""
        self.reducer = Reducer(self.units, placements, mesh, self.storage.link, self.listener, self.limits.reduce)
        self.passes = Passes(
            self._remains,
            self.reducer,
            self.listener,
            precision=precision,
            prefetch=Prefetch(self.units, self.storage, self.limits.prefetch),
            pipeline=pipeline,
        )
        self._ahead: ShardUnit | None = None  # its gather was started before `weights_changed`
        refuse_moves(model)
        if cuts or pipeline:
            count_whole(model, self.whole)
        for group in self.trainable_groups:
            group.access = GroupAccess(group, self.reducer, self.listener)
        keep_shards(model, self)

    @property
    def model(self) -> nn.Module:
        """The user's model, or what is left of it. It holds these shards (`ownership.py`); the caller must hold a reference."""
        return self._remains.model

    @property
    def whole(self) -> nn.Module:
        """The model with all its parameters; on the meta device if this rank holds only some pipeline stages."""
        return self.pipeline.whole if self.pipeline else self.model

    @property
    def is_spread(self) -> bool:
        """Whether no rank has all weights."""
        cut = any(self.mesh.axes.size(axis) > 1 for axis in ("pp", "tp", "ep"))
        return cut or (self.placements.params is Placement.SHARD and self.mesh.shard.size > 1)

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes at rest, by tier: weights, masters, offloaded gradients and transfer buffers. Local."""
        held = self.storage.buffer_nbytes()
        for group in self.groups:
            for tier, nbytes in group.resident_nbytes().items():
                held[tier] += nbytes
        return held

    # --------------------------------------------------------------------- step

    def synchronize_buffers(self) -> None:
        """Broadcast the buffers that training changes from the first data rank. Collective over dp and pp."""
        self.passes.buffers.synchronize()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep `Stay.WINDOW` units gathered inside the block, even after a stage's last backward; then free them. Local."""
        held = [group for unit in self.units if unit.stay is Stay.WINDOW for group in unit.groups]
        for group in held:
            group.pins += 1
        try:
            yield
        finally:
            for group in held:
                group.pins -= 1
                group.reshard()

    def finish_gradients(self) -> None:
        """Wait for all reductions. Afterwards `group.grad` is the mean over all data ranks.

        Local, except for weights that several pipeline stages hold (`Reducer.finish`).
        """
        self.reducer.finish()

    def reduce_rest(self) -> None:
        """Reduce gradients whose last backward was not announced, and adopt gradients set by user code. Collective over dp."""
        self.reducer.reduce_rest()

    def gradient_versions(self) -> list[int]:
        """One number per reduced gradient, which changes whenever the gradient is written. Local."""
        now = (g.gradient_now[0] for g in self.trainable_groups)
        return [-1 if grad is None else grad._version for grad in now]

    def multiply_gradients(self, factor: float) -> None:
        """Multiply all gradients of the window so far by `factor`, reduced or not. Local."""
        self.reducer.drain()
        for group in self.trainable_groups:
            group.multiply_gradient(factor)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what messages have left out by `factor`: the loss scale has changed. Local."""
        if factor != 1.0:
            for group in self.trainable_groups:
                for name, wire in group.messages.items():
                    if name != "momentum":  # without the loss scale
                        wire.multiply(factor)

    def keep_own(self, own: bool) -> None:
        """Whether gradients of the window that begins stay this rank's own until the step (`FlatGroup.keeps_own`). Local."""
        for group in self.trainable_groups:
            group.keeps_own = own

    def take_writes(self) -> None:
        """Copy weights that user code has written into the masters, which are stepped and saved. Local."""
        for group in self.groups:
            group.take_writes()

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window (`zero_grad`), or set those that exist to zero. Local."""
        self.reducer.drop(set_to_none)

    def zero_gradients(self, params: Container[int], set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters with these ids, or set those that exist to zero. Local."""
        self.reducer.drain()
        for group in self.trainable_groups:
            for index, p in enumerate(group.params):
                if id(p) in params:
                    group.zero_gradient(index, set_to_none)

    def finish_gathers(self) -> None:
        """Wait for running gathers of replicated weights before the model is dropped, when no forward will. Local.

        And for what copies of a shard exchange: the memory goes with the model."""
        for group in self.groups:
            group.rest.arrive()
            if group.is_replicated and group.full.is_current:
                group.wait_unshard()

    def weights_changed(self) -> None:
        """Call after `source` was written. Starts to all-gather replicated weights, overlapping the caller's next work.

        Collective over the shard axes at stages 1 and 2. Each unit waits for its own gather just before it is read.
        """
        check_still_frozen(g for g in self.groups if not g.trainable)
        for unit in self.units:
            unit.release_casts()
        for group in self.groups:
            group.write_back()
        self.storage.link.wait_device()
        # On a CPU, a gather in flight holds buffers. On a GPU it needs no memory beyond the full weights, which stay
        # allocated, and waiting for it would delay the next forward.
        most = math.inf if self.mesh.device.type == "cuda" else self.limits.gather
        in_flight: deque[ShardUnit] = deque()
        ahead, self._ahead = self._ahead, None
        units = [unit for unit in self._in_order_of_use() if unit is not ahead]
        for (
            unit
        ) in units:  # all of them first: what copies of a shard exchange is on its way when the first gather begins
            for group in unit.groups:
                group.weights_changed()
        for unit in units:
            if self.placements.params is Placement.SHARD or all(group.full.is_current for group in unit.groups):
                continue
            while in_flight and sum(u.numel for u in in_flight) + unit.numel > most:
                in_flight.popleft().wait_unshard()
            unit.unshard()
            in_flight.append(unit)

    def _in_order_of_use(self) -> list[ShardUnit]:
        """All units, in the order in which the next forward reads them."""
        seen = [index for orders in self.passes.kinds for index in orders.forward.units]
        return [self.units[i] for i in dict.fromkeys([*seen, *range(len(self.units))])]

    def read_first(self) -> ShardUnit | None:
        """The unit that the next forward reads first, if the optimizer should step it before the others; else None. Local.

        On GPUs at stages 1 and 2: its gather can overlap only with the step of the other units.
        """
        gathers = self.placements.params is not Placement.SHARD and self.placements.optim is Placement.SHARD
        if self.mesh.device.type != "cuda" or not gathers:
            return None
        return next((unit for unit in self._in_order_of_use() if unit.trainable), None)

    def gather_ahead(self, unit: ShardUnit) -> None:
        """Do what `weights_changed` does for `unit`, before the optimizer steps the others. Collective over the shard axis."""
        for group in unit.groups:
            group.write_back()
            group.weights_changed()
        unit.unshard()
        self._ahead = unit
