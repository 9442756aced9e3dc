"""Collectives of one rank in one step, exactly: which, how many, and the bytes that it sends.

    stage          0                1                     2                   3
    gathers        -                1                     1                   k (2 units - root - last unit - embedding)
    reductions     1 all-reduce     1 reduce-scatter      k reduce-scatters   k reduce-scatters

of every group of every unit, in a step of k microbatches, and one all-reduce for the norm of the gradient. A gather and a
reduce-scatter among n ranks send (n - 1) / n of the group, padding included, an all-reduce twice that. Groups of parameters
that are not trained are gathered only, at stage 3. With a second copy of the weights (`zero_hpz_partition_size`) all gathers
of a group but the first are among the ranks that share it; of what is not trained, all. Every unit is taken to be used and
reached by backward.
"""

from __future__ import annotations

from hf_dist.errors import TopologyError
from hf_dist.estimate.state_bytes import States
from hf_dist.sharding.placement import Placement


def step_traffic(states: States, *, accumulation: int = 1, replicas: int = 1) -> dict[str, tuple[int, int]]:
    """(number, bytes sent) of one rank's collectives in a step, by the names of `hf_dist.collectives`.

    `accumulation`: microbatches; `replicas`: copies of the sharded states (HSDP). Raises `TopologyError` for a pipeline.
    """
    if states.config.pipeline.stages > 1:
        raise TopologyError("pipeline.stages is above 1: what stages send each other is not planned")
    found: dict[str, tuple[int, int]] = {}

    def add(op: str, ranks: int, nbytes: int, times: int) -> None:
        if ranks > 1 and times:
            count, total = found.get(op, (0, 0))
            sent = (2 if op == "all_reduce" else 1) * (ranks - 1) * nbytes // ranks
            found[op] = count + times, total + times * sent

    placements, precision = states.placements, states.precision
    shards_params, shards_optim = placements.params is Placement.SHARD, placements.optim is Placement.SHARD
    windows = accumulation if placements.grads is Placement.SHARD else 1
    num_trained = 0
    for unit in states.units:
        stays = unit is states.units[0] or unit is states.units[-1]  # from forward to backward
        uses = accumulation * (2 if unit.needed_in_backward and not stays else 1)
        for group in unit.groups:
            shards = group.layout.num_shards
            if shards_params:
                second = group.at_rest.second
                far = uses if second is None else min(uses, int(group.trainable))
                add("all_gather", shards, group.nbytes, far)
                add("all_gather", placements.second, group.nbytes, uses - far)
            if not group.trainable:
                continue
            num_trained += len(group.layout.slots)
            if shards_optim and not shards_params:
                add("all_gather", shards, group.nbytes, 1)
            on_wire = group.layout.numel * precision.reduce.itemsize
            add("reduce_scatter" if shards_optim else "all_reduce", shards, on_wire, windows)
            held = group.at_rest.gradient
            add("all_reduce", replicas, held.numel * held.dtype.itemsize, 1)
    ranks = replicas * max((g.layout.num_shards for g in states.groups), default=1)
    add("all_reduce", ranks, 4 * (1 + num_trained), 1)
    return found
