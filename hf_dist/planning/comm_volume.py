"""One rank's collectives for weights and gradients in one step, exactly: which, how many, and the bytes sent.

    stage          0                1                     2                   3
    gathers        -                1                     1                   k (2 units - root - last unit - embedding)
    reductions     1 all-reduce     1 reduce-scatter      k reduce-scatters   k reduce-scatters

for every group of every unit, in a step of k microbatches, plus one all-reduce for the gradient norm. A gather and a
reduce-scatter over n ranks send (n - 1) / n of the group, including padding; an all-reduce sends twice that. Groups of
frozen parameters are only gathered, at stage 3. With a second copy of the weights (`zero_hpz_partition_size`), the first
gather of a group uses all ranks and the others only the ranks that share the copy; frozen groups use only the latter. A
pipeline gathers and reduces once per step, or as others do (`reshard_per_microbatch`); then only its last stage keeps the
root and its last unit from a forward to the next backward. Gradients of parameters that `tp` ranks hold alike are combined
over `tp` at the end, all of one kind at once; the norm is reduced over `tp`, too. Copies of a shard (HSDP) all-reduce its
gradient once per step; with pieces of its masters (`hf_dist.optimizer_over`) they reduce-scatter it, and all-gather weights.
Every unit is assumed to be used and reached by backward. Replicas that train alone (`local_sgd`) exchange their movement once
in several steps; the average per step is given.
Encoded messages (`hf_dist.wires`) have the bytes of their codec. Such a reduction is an all-to-all, of which an all-reduce
gathers the means; in two hops one inside of machines, with as many parts as ranks, and one between them with a part of each.
Activations: `layer_traffic.py`.
"""

from __future__ import annotations

import torch

from hf_dist.config import settled
from hf_dist.dist.axes import NEIGHBOURS, Axes
from hf_dist.dist.low_rank import message_numels
from hf_dist.planning.mean import Mean
from hf_dist.planning.planned_unit import PlannedGroup, PlannedUnit
from hf_dist.planning.sliced import Crossed, add, merged
from hf_dist.planning.state_bytes import States
from hf_dist.sharding.group_axes import DENSE
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.precision import MASTER_DTYPE
from hf_dist.tensors.codecs import Codec

__all__ = ["Traffic", "state_traffic", "step_traffic"]

Traffic = dict[str, Crossed]
"""(number, bytes) by operation, for each axis as `dist/axes.py` names it; those of blocks: `States.in_blocks`."""


def step_traffic(states: States, *, accumulation: int = 1, replicas: int = 1) -> Crossed:
    """(number, bytes sent) of one rank's collectives in a step, summed over all axes, by the names of
    `hf_dist.dist.collectives`.

    `accumulation`: microbatches; `replicas`: copies of the sharded states (HSDP). For a model that is whole on its ranks.
    """
    shard = max((g.layout.num_shards for g in states.groups), default=1)
    config = states.config.replaced({"gradient_accumulation_steps": (accumulation, "plan")})
    axes = Axes({"dp_replicate": replicas, "dp_shard": shard})
    return merged(*state_traffic(states.with_config(config), axes).values())


class _Sent:
    """What one rank sends in a step, added up by axis."""

    def __init__(self) -> None:
        self.by_axis: Traffic = {}

    def send(self, axis: str, op: str, ranks: int, nbytes: int, times: int = 1) -> None:
        """A collective of `ranks` ranks over `nbytes` in all."""
        if ranks > 1 and times:
            sent = (2 if op == "all_reduce" else 1) * (ranks - 1) * nbytes // ranks
            add(self.by_axis.setdefault(axis, {}), op, times * sent, times)

    def gather(
        self, axis: str, ranks: int, numel: int, dtype: torch.dtype, codec: Codec | None, times: int = 1
    ) -> None:
        """An all-gather of `numel` elements in all."""
        nbytes = numel * dtype.itemsize if codec is None else ranks * codec.nbytes(numel // ranks)
        self.send(axis, "all_gather", ranks, nbytes, times)

    def reduce(self, mean: Mean, codec: Codec | None, times: int = 1) -> None:
        """The collectives of a mean."""
        for one in mean.sent(codec):
            self.send(*one, times)


def state_traffic(states: States, axes: Axes) -> Traffic:
    """One rank's traffic for weights, gradients and norm in a step, by axis; `states`: those of a rank of `axes`."""
    accumulation = settled(states.config.gradient_accumulation_steps) or 1
    sent = _Sent()
    found, send, gather, reduce = sent.by_axis, sent.send, sent.gather, sent.reduce
    alone = states.config.local_sgd.enabled and axes.size("dp_replicate") > 1
    placements = states.placements
    shards_params, shards_optim = placements.params is Placement.SHARD, placements.optim is Placement.SHARD
    windows = accumulation if placements.grads is Placement.SHARD else 1
    num_trained = 0
    alike: dict[tuple[str, int, torch.dtype], int] = {}
    for unit in states.units:
        uses = _uses(states, unit, accumulation)
        for group in unit.groups:
            shards, wires = group.layout.num_shards, group.at_rest.wires
            axis = "shard" if shards == axes.size("shard") else "edp"
            if shards_params:
                second = group.at_rest.second
                far = uses if second is None else min(uses, int(group.trainable))
                gather(axis, shards, group.layout.numel, group.dtype, wires.weights, far)
                if second is not None:
                    send(NEIGHBOURS, "all_gather", placements.second, placements.second * second.nbytes, uses - far)
            if not group.trainable:
                continue
            num_trained += len(group.layout.slots)
            if shards_optim and not shards_params:
                gather(axis, shards, group.layout.numel, group.dtype, wires.weights)
            if wires.low_rank is not None:
                for numel in message_numels(*group.factors, group.layout.numel):
                    send(axis, "all_reduce", shards, numel * states.precision.reduce.itemsize, windows)
            elif wires.momentum is not None:  # as after its warm-up
                reduce(states.sent_momentum(group), wires.momentum)
            else:
                reduce(states.reduction(group), wires.gradients, windows)
            held = group.at_rest.gradient
            _between_copies(sent, states, group, axes, alone)
            if group.copies is not None:
                kind = (*group.copies, held.dtype)
                alike[kind] = alike.get(kind, 0) + held.numel * held.dtype.itemsize
    for (_, among, _), nbytes in alike.items():
        send("tp", "all_reduce", among or axes.size("tp"), nbytes)
    norm = "dp" if not alone else "shard" if axes.size("cp_replicate") == 1 else "cp"
    for axis, numbers in ((norm, 2 + num_trained), ("tp", 2 + num_trained), ("pp", 2)):
        send(axis, "all_reduce", axes.size(axis), 4 * numbers)
    if alone and "dp_replicate" in found:
        every = states.config.local_sgd.every
        found["dp_replicate"] = {op: (n // every, b // every) for op, (n, b) in found["dp_replicate"].items()}
    return found


def _between_copies(sent: _Sent, states: States, group: PlannedGroup, axes: Axes, alone: bool) -> None:
    """The mean of a shard's gradient over its copies, or their pieces of that, and of the weights afterwards. `alone`: copies
    along `dp_replicate` exchange their movement instead."""
    wires, held, awaiting = group.at_rest.wires, group.at_rest.gradient, group.at_rest.awaiting
    numel = held.numel if awaiting is None else awaiting.numel
    for axis, _ in DENSE:
        meets = alone and axis == "dp_replicate"
        codec = states.placements.wires.meetings if meets else wires.copies if axis == "dp_replicate" else None
        dtype = MASTER_DTYPE if meets else held.dtype
        sent.reduce(Mean(axis, axes.size(axis), numel, dtype, whole=awaiting is None), codec)
        if awaiting is not None:
            sent.gather(axis, axes.size(axis), numel, group.dtype, codec)
            numel //= axes.size(axis)


def _uses(states: States, unit: PlannedUnit, accumulation: int) -> int:
    """Gathers of a unit in a step, if weights are sharded."""
    first, last = states.units[0], states.units[-1]
    # A stage before the last runs other forwards before the backward of one.
    ends = (states.config.pipeline.stages == 1 or first.stands_last) and (unit is first or unit is last)
    stay = max(states.stay(unit), Stay.BACKWARD) if ends else states.stay(unit)
    if stay is Stay.WINDOW:
        return 1
    return accumulation * (2 if unit.needed_in_backward and stay is Stay.USE else 1)
