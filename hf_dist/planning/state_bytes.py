"""Exact bytes of one rank's model states, from the same layouts and tiers by which the engine allocates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from hf_dist.config import DistConfig, settled
from hf_dist.dist.axes import HOPS, NEIGHBOURS, Axes
from hf_dist.dist.low_rank import kept_numel
from hf_dist.float8.casts import keeps_casts, kept_nbytes
from hf_dist.float8.choice import choose
from hf_dist.float8.recipe import kernels_of
from hf_dist.memory.offload.nvme import disk_nbytes
from hf_dist.memory.offload.resting import Tier
from hf_dist.memory.offload.storage import MASTER_NBYTES, TENSORS_PER_GROUP, Storage
from hf_dist.optim.owners import assigned, heaviest_first
from hf_dist.parallel.experts.spread import expert_counts, expert_slices
from hf_dist.parallel.local_sgd.outer import num_outer_states
from hf_dist.planning.mean import Mean
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.planning.planned_unit import PlannedGroup, PlannedUnit
from hf_dist.sharding.at_rest import TensorAtRest, plan_at_rest
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.param_slice import cut_along, held_slice
from hf_dist.sharding.placement import Placement, StatePlacements, Stay, placements_for
from hf_dist.sharding.precision import MASTER_DTYPE, Precision, precision_for
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.unit import reads_weights_in_backward
from hf_dist.sharding.units import find_unit_modules, travel_together, unit_members


def _none() -> dict[Tier, int]:
    return dict.fromkeys(Tier, 0)


@dataclass
class StateBytes:
    """Bytes on one rank, by kind of state and of memory."""

    weights: dict[Tier, int] = field(default_factory=_none)
    """Weights in the dtype of use."""
    masters: dict[Tier, int] = field(default_factory=_none)
    """fp32 master weights, unless the weights themselves are fp32."""
    optimizer: dict[Tier, int] = field(default_factory=_none)
    gradients: dict[Tier, int] = field(default_factory=_none)
    """Reduced gradients, as the optimizer reads them. Host buffers are kept; device buffers last for one window."""
    awaiting: dict[Tier, int] = field(default_factory=_none)
    """Those of whole shards, if copies have pieces of their masters. Host buffers are kept."""
    residuals: dict[Tier, int] = field(default_factory=_none)
    """What encoded reductions have left out, from the first one on."""
    buffers: dict[Tier, int] = field(default_factory=_none)
    """Buffers for transfers to and from disk; an upper bound."""

    def resident(self, tier: Tier) -> int:
        """Bytes between two steps, as `engine.resident_nbytes()` counts (which omits buffers that were never needed)."""
        held = (
            self.weights[tier] + self.masters[tier] + self.optimizer[tier] + self.buffers[tier] + self.residuals[tier]
        )
        return held + (self.gradients[tier] + self.awaiting[tier] if tier is Tier.HOST else 0)


@dataclass(frozen=True)
class States:
    """The model states of one rank under one config."""

    units: tuple[PlannedUnit, ...]
    placements: StatePlacements
    precision: Precision
    config: DistConfig
    storage: Storage
    optimizer: OptimizerStates
    rank: int = 0
    """Rank among those over which ZeRO shards the optimizer's part of dense weights."""
    stays: Mapping[str, Stay] = field(default_factory=dict)
    """By path: units whose gathered weights are kept for another time than `placements` says."""
    outer_states: int = 0
    """Number of fp32 tensors besides the master weights, for replicas that train alone."""
    near: int = 1
    """Adjacent ranks of `shard` that add up encoded gradients among themselves before others; 1: one hop."""
    copies: int = 1
    """Copies of a shard that exchange its gradient in every step (`dp_replicate`)."""

    @classmethod
    def of_engine(cls, sharded: ShardedModel, config: DistConfig, optimizer: OptimizerStates | None = None) -> States:
        """The states of a model that is already sharded."""
        units = tuple(
            PlannedUnit(
                u.name,
                tuple(PlannedGroup(g.layout, g.dtype, g.trainable, g.at_rest) for g in u.groups),
                u.needed_in_backward,
            )
            for u in sharded.units
        )
        states = cls(
            _in_module_order(sharded.model, units),
            sharded.placements,
            sharded.precision,
            config,
            sharded.storage,
            optimizer or OptimizerStates(),
            (sharded.mesh.dp if any(g.axes.outer for g in sharded.groups) else sharded.mesh.shard).rank,
            {u.name: u.stay for u in sharded.units},
            num_outer_states(config, 1 if sharded.mesh.replicas is None else sharded.mesh.replicas.size),
        )
        near = max((g.axes.hops[0].size for g in sharded.trainable_groups if g.axes.hops), default=1)
        return replace(states, near=near, copies=sharded.mesh.axes.size("dp_replicate"))

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        config: DistConfig,
        *,
        num_shards: int,
        rank: int = 0,
        ep: int = 1,
        names: frozenset[str] | None = None,
        holders: Mapping[str, object] | None = None,
        copies: Mapping[str, tuple[str, int]] | None = None,
        pieces: int = 1,
    ) -> States:
        """The states on `rank` of `num_shards` for a model that may be on meta, with a resolved config. Allocates nothing.

        `ep`: number of these ranks with different experts; `names`: parameters of this rank's pipeline stages (None: all);
        `holders`: those that other stages also hold; `copies`: those that other ranks of `tp` also hold;
        `pieces`: copies of a shard among which its masters are cut (the first is planned).
        """
        zero = config.zero_optimization
        placements, precision = placements_for(config), precision_for(config, model)
        if config.hf_dist.fp8.enabled:
            skip, kernels = config.hf_dist.fp8.skip, kernels_of(config, None)
            eights = choose(model, experts=expert_counts(model), skip=skip, kernels=kernels).of_slices()
            precision = replace(precision, float8=eights.weights)
        storage = Storage(torch.device("meta"), zero)
        leaf = (zero.leaf_module.classes, zero.leaf_module.names, zero.leaf_module.name_suffixes)
        units = []
        modules = find_unit_modules(model, leaf)
        slices = expert_slices(model, ep, rank % ep)
        along = {name: "ep" if name in slices else cut_along(p) for name, p in model.named_parameters()}
        rows: dict[object, object] = {}

        def row(name: str) -> object:  # one object for parameters to which the engine would give the same axes
            key = (along[name], (copies or {}).get(name), id((holders or {}).get(name)))
            return rows.setdefault(key, key)

        for path, members in unit_members(model, modules).items():
            named = [(n, p) for n, p in members if names is None or n in names]
            groups = []
            alone = lambda name: name in slices and num_shards == ep  # noqa: E731
            for together in travel_together(named, precision, row, alone, placements.in_eights(precision)):
                name, first = together[0]
                dtype = precision.compute_dtype(name, first.dtype)
                apart = ep if name in slices else 1
                held = [(n, slices.get(n) or held_slice(p)) for n, p in together]
                layout = FlatLayout.pack(
                    held, num_shards // apart, pieces if first.requires_grad else 1, placements.wires.alignment
                )
                at_rest = plan_at_rest(
                    layout,
                    rank // apart * layout.pieces,
                    first.requires_grad,
                    dtype,
                    frozen=precision.frozen_dtype(dtype, [p.dtype for _, p in together]),
                    placements=placements,
                    storage=storage,
                    precision=precision,
                    spread=apart > 1,
                )
                groups.append(PlannedGroup(layout, dtype, first.requires_grad, at_rest, (copies or {}).get(name)))
            if named or not path:
                needed = not path or reads_weights_in_backward([modules[path]])
                units.append(PlannedUnit(path, tuple(groups), needed))
        ordered = _in_module_order(model, units)
        return cls(ordered, placements, precision, config, storage, OptimizerStates.of_config(config), rank)

    @property
    def groups(self) -> list[PlannedGroup]:
        """All groups, unit by unit."""
        return [g for u in self.units for g in u.groups]

    @cached_property
    def nbytes(self) -> StateBytes:
        """Bytes at rest, and the reduced gradients."""
        found = StateBytes()
        for group in self.groups:
            at_rest = group.at_rest
            if at_rest.whole:
                found.weights[Tier.DEVICE] += group.nbytes
            if at_rest.second is not None:
                found.weights[at_rest.second.tier] += at_rest.second.nbytes
            if at_rest.shard is not None:  # the masters are the only copy of trainable weights
                is_master = group.trainable and at_rest.master is None
                (found.masters if is_master else found.weights)[at_rest.shard.tier] += at_rest.shard.nbytes
            if at_rest.master is not None:
                found.masters[at_rest.master.tier] += at_rest.master.nbytes
            if group.trainable:
                found.gradients[at_rest.gradient.tier] += at_rest.gradient.nbytes
                if at_rest.awaiting is not None:
                    found.awaiting[at_rest.awaiting.tier] += at_rest.awaiting.nbytes
                self._add_optimizer(group, found.optimizer)
                self._add_outer(group, found.optimizer)
                found.residuals[Tier.DEVICE] += self._residuals_nbytes(group)
        found.optimizer[Tier.DEVICE] += self._owned_nbytes()
        if self.frees_gradients and (settled(self.config.gradient_accumulation_steps) or 1) == 1:
            found.gradients[Tier.DEVICE] = max(u.reduced for u in self.units)
        found.buffers[Tier.HOST] = self._buffer_nbytes()
        return found

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, how exact) of one rank's states, without zero rows."""
        held, rows = self.nbytes, []
        wide = "bf16" if self.config.bf16.bf16_master_weights_and_grads else "fp32"
        for tier, where in ((Tier.DEVICE, ""), (Tier.HOST, " on the host"), (Tier.DISK, " on disk")):
            rows += [
                (f"weights{where}", held.weights[tier], "exact"),
                (f"{wide} master weights{where}", held.masters[tier], "exact"),
                (f"optimizer state{where}", held.optimizer[tier], "exact"),
                (f"gradients{where}", held.gradients[tier], "exact" if where else "after backward"),
                (
                    f"{self._awaited}{where}",
                    held.awaiting[tier],
                    "exact" if where else "in a window",
                ),
                (f"left out of encoded messages{where}", held.residuals[tier], "after a step"),
                (f"buffers of transfers{where}", held.buffers[tier], "at most"),
            ]
        return [row for row in rows if row[1]]

    def reduction(self, group: PlannedGroup) -> Mean:
        """The reduction of its gradient among the ranks of a shard."""
        shards = group.layout.num_shards
        is_dense = shards == self.shards  # else experts, which others hold the rest of
        whole = self.placements.optim is not Placement.SHARD
        near = self.near if is_dense else 1
        return Mean("shard" if is_dense else "edp", shards, group.layout.numel, self.precision.reduce, whole, near)

    def sent_momentum(self, group: PlannedGroup) -> Mean:
        """What an optimizer that sends momentum exchanges in a step, in place of the reduction."""
        return replace(self.reduction(group), dtype=torch.float32, whole=True, near=1)

    def _residuals_nbytes(self, group: PlannedGroup) -> int:
        wires, awaiting = group.at_rest.wires, group.at_rest.awaiting
        if wires.momentum is not None:  # where it is sharded, each rank keeps all of it to add its gradient to
            kept = group.layout.numel if self.placements.optim is Placement.SHARD else 0
            return torch.float32.itemsize * (kept + self.sent_momentum(group).left_out(wires.momentum))
        if wires.low_rank is not None:
            return torch.float32.itemsize * kept_numel(group.factors[0], wires.low_rank)
        if not self.placements.wires.feedback:
            return 0
        held = awaiting or group.at_rest.gradient
        between = Mean("dp_replicate", self.copies, held.numel, held.dtype, whole=awaiting is None)
        apart = self.placements.wires.meetings if self.config.local_sgd.enabled else wires.copies
        of = ((self.reduction(group), wires.gradients), (between, apart))
        return 4 * sum(mean.left_out(codec) for mean, codec in of if codec is not None)

    @property
    def _awaited(self) -> str:
        """What `awaiting` holds, in words."""
        if self.placements.wires.momentum is not None:
            return "own gradients, where momentum is sent"
        return "gradients that await the other copies"

    def _add_outer(self, group: PlannedGroup, held: dict[Tier, int]) -> None:
        stepped = group.at_rest.master or group.at_rest.shard
        tier = Tier.DEVICE if stepped is None else stepped.tier
        start, stop = group.at_rest.interval
        held[tier] += self.outer_states * TensorAtRest(tier, stop - start, MASTER_DTYPE).nbytes

    def _add_optimizer(self, group: PlannedGroup, held: dict[Tier, int]) -> None:
        at_rest = group.at_rest
        stepped = at_rest.master or at_rest.shard
        tier = Tier.DEVICE if stepped is None else stepped.tier
        start, stop = at_rest.interval
        if tier is Tier.DISK:
            held[Tier.DISK] += sum(disk_nbytes(size * (stop - start), torch.uint8) for size in self._elements_of(group))
        for slot in group.layout.slots:
            numel = min(slot.stop, stop) - max(slot.offset, start)
            if numel > 0:
                elements, nbytes = self.optimizer.of_slot(slot)
                held[Tier.HOST if tier is Tier.DISK else tier] += nbytes
                held[tier] += 0 if tier is Tier.DISK else numel * sum(elements)

    def _elements_of(self, group: PlannedGroup) -> list[int]:
        """Bytes per element of each state of a group on disk, where each optimizer has a file of its own for all of it."""
        names = {slot.name for slot in group.layout.slots}
        each = self.optimizer.each or (self.optimizer,)
        return [size for one in each if not one.names or one.names & names for size in one.elements]

    def _owned_nbytes(self) -> int:
        """Bytes of the states that owners of whole tensors keep."""
        return sum(self._owned_of(one) for one in self.optimizer.each or (self.optimizer,))

    def _owned_of(self, states: OptimizerStates) -> int:
        whole = states.of_whole
        trained = [group for group in self.groups if group.trainable]
        if whole is None or not trained:
            return 0
        slots = [s for g in trained for s in g.layout.slots if states.names is None or s.name in states.names]
        tensors = sorted(((math.prod(s.shape), s.name, s.shape) for s in slots), key=heaviest_first)
        owners = assigned(
            [numel for numel, *_ in tensors], [0.0] * (trained[0].layout.num_shards * trained[0].layout.pieces)
        )
        return sum(
            whole(name, shape) for (_, name, shape), owner in zip(tensors, owners, strict=True) if owner == self.rank
        )

    def _buffer_nbytes(self) -> int:
        shards = [g.at_rest.interval[1] - g.at_rest.interval[0] for g in self.groups]
        largest, storage = max(shards, default=0), self.storage
        nbytes = 0
        if storage.optim.tier is Tier.DISK:
            nbytes += storage.optim_depth * TENSORS_PER_GROUP * disk_nbytes(largest * MASTER_NBYTES, torch.uint8)
        if storage.params.tier is Tier.DISK:
            nbytes += (storage.ahead_count + 1) * disk_nbytes(largest, self.precision.compute)
        return nbytes

    # ------------------------------------------------------- temporary memory

    def keeping(self, stays: Mapping[str, Stay]) -> States:
        """These states with other units kept. Bytes at rest are the same and not computed again."""
        other = replace(self, stays=stays)
        other.__dict__["nbytes"] = self.nbytes
        return other

    def on_machines(self, axes: Axes, ranks_per_machine: int) -> States:
        """These states in a job with these axes and machines of so many ranks: copies, and hops of encoded reductions."""
        near = self.placements.wires.near(axes, ranks_per_machine)
        return replace(self, near=near, copies=axes.size("dp_replicate"))

    def in_blocks(self, axes: Axes) -> Axes:
        """`axes` with those of adjacent ranks: neighbours with a second copy of the weights, hops of encoded reductions."""
        second = self.placements.second if any(g.at_rest.second is not None for g in self.groups) else 1
        sizes = {NEIGHBOURS: second, HOPS[0]: self.near}
        return replace(axes, blocks={name: size for name, size in sizes.items() if size > 1})

    def with_config(self, config: DistConfig) -> States:
        """The same states under a config that differs only in what does not rest, namely the number of microbatches."""
        return replace(self, config=config)

    def stay(self, unit: PlannedUnit) -> Stay:
        """How long the unit's gathered weights are kept."""
        return self.stays.get(unit.path, self.placements.stay)

    def kept(self, stay: Stay) -> list[PlannedUnit]:
        """Units that are kept for this time; none if weights are replicated."""
        gathers = self.placements.params is Placement.SHARD
        return [u for u in self.units if self.stay(u) is stay] if gathers else []

    @property
    def kept_nbytes(self) -> int:
        """Bytes of units kept gathered beyond their use, of encoded shards kept to be sent again, and of weights cast once for
        a window; all of them are in memory at the end of a forward."""
        return self.kept_units_nbytes + sum(u.kept_encoded for u in self.units) + self.casts_nbytes

    @property
    def kept_units_nbytes(self) -> int:
        """Bytes of units kept gathered beyond their use."""
        return sum(u.nbytes for stay in (Stay.BACKWARD, Stay.WINDOW) for u in self.kept(stay))

    @property
    def casts_nbytes(self) -> int:
        """Bytes of weights in eight bits, where a window of several microbatches keeps them."""
        if not keeps_casts(self.config):
            return 0
        whole = self.placements.params is not Placement.SHARD
        stays = [u for u in self.units[1:] if whole or self.stay(u) is Stay.WINDOW]
        slots = [s for u in stays for g in u.groups for s in g.layout.slots if s.name in self.precision.float8]
        return sum(kept_nbytes(slot.shape, self.config.hf_dist.fp8.recipe) for slot in slots)

    @cached_property
    def shards(self) -> int:
        """Ranks of a shard."""
        return max(g.layout.num_shards for g in self.groups)

    def flying(self, numel: int) -> int:
        """Bytes of gradients in flight: themselves, and encoded ones as they are sent and received, with what feedback adds."""
        nbytes = numel * self.precision.wire(self.shards).itemsize
        codec = self.placements.wires.gradients
        if codec is not None and self.shards > 1:
            nbytes += 2 * codec.nbytes(numel) + 2 * numel * torch.float32.itemsize * self.placements.wires.feedback
        return nbytes

    @property
    def collects_window(self) -> bool:
        """Whether each rank sums a whole window's gradients before they are reduced."""
        return self.placements.grads is Placement.PARTIAL

    @property
    def cuts_copies(self) -> bool:
        """Whether copies of a shard have pieces of its masters."""
        return any(g.at_rest.awaiting is not None for g in self.groups)

    @property
    def window_nbytes(self) -> int:
        """Bytes of these gradients."""
        return sum(u.learning for u in self.units) * self.precision.grads.itemsize

    @property
    def frees_gradients(self) -> bool:
        """Whether a unit's reduced gradient is freed once the unit is stepped, inside backward."""
        return self.config.hf_dist.optimizer_in_backward


def _in_module_order(model: nn.Module, units: Sequence[PlannedUnit]) -> tuple[PlannedUnit, ...]:
    """The root, then the others in the order of their modules, which a plan takes as the order of the forward."""
    place = {path: i for i, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    root, *others = units
    others.sort(key=lambda u: place.get(u.path, 0))
    blocks = [place.get(u.path, 0) for u in others if u.needed_in_backward]
    own = [place.get(s.name.rpartition(".")[0], 0) for g in root.groups if g.trainable for s in g.layout.slots]
    held = [place.get(s.name.rpartition(".")[0], 0) for g in root.groups for s in g.layout.slots]
    last = not blocks or any(at > blocks[-1] for at in held)
    return (replace(root, stands_first=not blocks or any(at < blocks[0] for at in own), stands_last=last), *others)
