"""The duration of a step under a layout, part by part, from counted operations and bytes and rough speeds.

    compute        matrix products and attention of forward and backward; memory that all other kernels read and write, each by
                   itself, or those between two products as one (compiled blocks); in float8 (`eights.py`) the casts as well
    recomputation  the same for recomputed blocks
    tp, cp, ep     activations sent while nothing else runs; sums of backward over tp begin before the weight gradients
    weights        gathers that forward does not hide, reductions (stage 3: and gathers) that backward does not hide; the ends
                   of a step: first gathers and last reductions, hidden only by norms and, at stages 1 and 2, the optimizer
    bubble         a pipeline's idle time
    optimizer      reads and writes of states

Microbatches of a pipeline follow one another; sends between its stages are hidden. The host takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_dist.config.sections import Fp8Config
from hf_dist.dist.axes import HOPS, NEIGHBOURS, Axes
from hf_dist.planning.activations import Activations
from hf_dist.planning.comm_volume import Traffic
from hf_dist.planning.eights import IN_BF16, Cost, Eights, total
from hf_dist.planning.hardware import Hardware, link_of
from hf_dist.planning.layouts import Layout
from hf_dist.planning.sliced import Crossed, EarlySum
from hf_dist.sharding.group_axes import DENSE
from hf_dist.sharding.placement import Placement

__all__ = ["PARTS", "StepTime", "Sum", "step_time"]

PARTS = ("compute", "recomputation", "tp", "cp", "ep", "weights", "bubble", "optimizer")
_LOSS_NBYTES = 40
"""Bytes the loss reads and writes per logit, forward and backward: casts, log-softmax, label selection."""
_GRADIENT_NBYTES = 6
"""Bytes per gradient element and microbatch: read in half precision, written in fp32."""
_STATES_NBYTES = 32
"""Bytes per element that a rank steps: masters, gradients and two states, read and written."""
_NORM_NBYTES = 4
"""Bytes per element that a rank steps: its gradient, read for the norm."""
_PAIRWISE = ("ep", "cp")
_OF_SHARDS = ("shard", "edp", NEIGHBOURS, *HOPS)
_OF_COPIES = tuple(axis for axis, _ in DENSE)
_OF_WEIGHTS = (*_OF_SHARDS, *_OF_COPIES, "dp")
"""Axes along which weights and gradients travel."""


@dataclass(frozen=True)
class Sum:
    """What one rank computes in a microbatch."""

    forward: float
    """Seconds of a forward."""
    backward: float
    """Seconds of a backward, without what runs again: twice a forward in bf16."""
    again: float
    """Seconds of recomputed blocks."""
    window: float = 0.0
    """Seconds of what a window computes once: casts of weights to float8."""

    @classmethod
    def of(
        cls,
        found: Activations,
        recomputed: str,
        hardware: Hardware,
        *,
        fused: bool = False,
        fp8: Fp8Config = IN_BF16,
        keeps: bool = False,
    ) -> Sum:
        """`found`: the whole model, on one rank of `tp` and `cp`; `recomputed`: one of `layouts.RECOMPUTED`.

        `fused`: blocks are compiled; `fp8`: whether and how linear layers multiply in float8; `keeps`: a window casts
        weights once.
        """
        of_blocks = "fused" if fused else "moved"
        products, moved = (sum(getattr(block.work, name) for block in found.blocks) for name in ("flops", of_blocks))
        loss = _LOSS_NBYTES * found.rows * found.vocabulary / 3
        forward = (products + found.rest.flops) / hardware.flops + (moved + found.rest.moved + loss) / hardware.memory
        again = 0.0 if recomputed == "nothing" else moved / hardware.memory
        if recomputed == "blocks":
            again += products / hardware.flops
        bf16 = cls(forward, 2 * forward, again)
        cost = Cost.of(fp8, hardware, fused=fused, keeps=keeps)
        if cost is None:
            return bf16
        works = [block.work for block in found.blocks]
        with_layers = bf16._in_float8(cost, total(w.eights for w in works), found.rest.eights, recomputed)
        experts = total(w.experts for w in works)
        return with_layers._in_float8(Cost.of_experts(hardware), experts, found.rest.experts, recomputed)

    def _in_float8(self, cost: Cost, blocks: Eights, rest: Eights, recomputed: str) -> Sum:
        """The same if these products of blocks, and of the rest, are in float8 instead of bf16."""
        whole, rate = total([blocks, rest]), cost.hardware.flops
        again = self.again
        if recomputed == "blocks":
            again += cost.forward(blocks) - blocks.flops / rate
        elif (
            recomputed == "selective" and not cost.fused
        ):  # the product is kept, and the kernels before it run all the same
            again += cost.casting(blocks)
        return Sum(
            self.forward + cost.forward(whole) - whole.flops / rate,
            self.backward + cost.backward(whole) - 2 * whole.flops / rate,
            again,
            self.window + cost.window(whole),
        )

    def shared(self, stages: int) -> Sum:
        """The computation of one of `stages` equal stages."""
        seconds = (self.forward, self.backward, self.again)
        forward, backward, again = (each / stages for each in seconds)
        return Sum(forward, backward, again, self.window / stages)


@dataclass(frozen=True)
class StepTime:
    """Seconds by part, and the bytes sent by axis."""

    parts: Mapping[str, float]
    bubble: float = 0.0
    """Share of the ranks' time."""
    inside: int = 0
    """Bytes that a rank sends within its machine in a step."""
    between: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes by axis."""
    alone: Mapping[str, float] = field(default_factory=dict)
    """Seconds of these sends by axis if nothing ran beside them."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def hidden(self) -> float:
        """Seconds of gathers and reductions beside which something is computed."""
        weights = sum(self.alone.get(axis, 0.0) for axis in _OF_WEIGHTS)
        return max(0.0, weights - self.parts["weights"])

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(self.parts[name] for name in ("tp", "cp", "ep", "weights"))


def step_time(
    work: Sum,
    traffic: Traffic,
    axes: Axes,
    layout: Layout,
    hardware: Hardware,
    *,
    bubble: float,
    numel: int,
    ends: float,
    early: Mapping[EarlySum, float] | None = None,
) -> StepTime:
    """`traffic`: of a rank in a step; `bubble`: the schedule's share; `numel`: a rank's parameters before ZeRO; `ends`: the
    share of them that is gathered before anything runs, and whose gradients come last; `early`: sums over `tp` of a microbatch
    that begin early -> how many."""
    links = _Links(axes, hardware)
    seconds = {axis: links.seconds(axis, crossed) for axis, crossed in traffic.items()}
    split = [links.split(axis, crossed) for axis, crossed in traffic.items()]
    hidden = sum(
        count * min(hardware.latency + one.nbytes / hardware.inside, one.flops / hardware.flops)
        for one, count in (early or {}).items()
    )
    number = layout.microbatches
    compute = (work.forward + work.backward + _GRADIENT_NBYTES * numel / hardware.memory) * number + work.window
    again = work.again * number
    pieces = layout.dp_replicate if layout.over else 1
    stepped = numel // (layout.dp_shard * layout.cp * pieces if layout.placements.optim is Placement.SHARD else 1)
    optimizer = _STATES_NBYTES * stepped / hardware.memory
    parts = {
        "compute": compute,
        "recomputation": again,
        "tp": max(0.0, seconds.get("tp", 0.0) - number * hidden),
        "cp": seconds.get("cp", 0.0),
        "ep": seconds.get("ep", 0.0),
        "weights": _exposed(layout, _Sends.of(traffic, layout, links), work, ends, optimizer) + seconds.get("dp", 0.0),
        "bubble": 0.0,
        "optimizer": optimizer,
    }
    busy = sum(parts[name] for name in ("compute", "recomputation", "tp", "cp", "ep"))
    parts["bubble"] = busy * bubble / (1 - bubble)
    inside, between = sum(here for here, _ in split), sum(away for _, away in split)
    sent = {axis: sum(n for _, n in crossed.values()) for axis, crossed in traffic.items()}
    return StepTime(parts, bubble, inside, between, sent, seconds)


@dataclass(frozen=True)
class _Links:
    """What a rank's sends along an axis take."""

    axes: Axes
    hardware: Hardware

    def split(self, axis: str, crossed: Crossed) -> tuple[int, int]:
        """Bytes inside of a machine, and between machines."""
        link = link_of(self.axes, axis, self.hardware.ranks_per_machine)
        return link.split(sum(n for _, n in crossed.values()), pairwise=axis in _PAIRWISE)

    def seconds(self, axis: str, crossed: Crossed) -> float:
        """If nothing ran beside them."""
        here, away = self.split(axis, crossed)
        latency = sum(count for count, _ in crossed.values()) * self.hardware.latency
        return max(here / self.hardware.inside, away / self.hardware.between) + latency


@dataclass(frozen=True)
class _Sends:
    """Seconds of weights and gradients in a step, if nothing ran beside them."""

    gathers: float
    """Of all gathers among the ranks of a shard."""
    reductions: float
    spread: float
    """Of the pieces of weights that copies of a shard gather, if the optimizer is sharded over them."""
    copies: float
    """Of gradients between copies of a shard."""

    @classmethod
    def of(cls, traffic: Traffic, layout: Layout, links: _Links) -> _Sends:
        """An encoded all-reduce ends with a gather, too."""

        def of(names: tuple[str, ...], gathers: bool, *, gathered: bool) -> float:
            found = 0.0
            for axis in names:
                own = {op: n for op, n in traffic.get(axis, {}).items() if (gathered and op == "all_gather") is gathers}
                found += links.seconds(axis, own) if own else 0.0
            return found

        rounds = layout.rounds
        weights = bool(rounds.forward + rounds.backward)
        return cls(
            of(_OF_SHARDS, True, gathered=weights),
            of(_OF_SHARDS, False, gathered=weights),
            of(_OF_COPIES, True, gathered=layout.over),
            of(_OF_COPIES, False, gathered=layout.over),
        )


def _exposed(layout: Layout, sends: _Sends, work: Sum, ends: float, optimizer: float) -> float:
    """Seconds of gathers and reductions that computation does not hide.

    Norms of complete gradients are computed beside the last reductions. At stages 1 and 2 the first gather runs beside the
    optimizer, which takes `optimizer` seconds and steps that unit first.
    Pipelines gather and reduce once, overlapped with one microbatch; copies are reduced once, after their shards. If the
    optimizer is sharded over them, their weights are gathered once as well, before the first gather of the shards.
    """
    states, rounds = layout.placements, layout.rounds
    spread, copies = sends.spread, sends.copies
    one = sends.gathers / max(1, rounds.forward + rounds.backward)
    reduction = sends.reductions / max(1, rounds.reductions)
    before = max(0.0, (rounds.forward - 1) * (one - work.forward))
    before += max(0.0, one + spread - work.forward) if rounds.forward else 0.0
    beside = rounds.reductions * (work.backward + work.again)
    after = max(0.0, rounds.backward * one + sends.reductions + copies - beside)
    first, last = ends * (min(rounds.forward, 1) * one + spread), ends * (reduction + copies)
    if states.optim is not states.params:  # the optimizer's own shards are gathered
        first = max(0.0, first - (1 - ends) * optimizer)
    last = max(0.0, last - (1 - ends) * optimizer * _NORM_NBYTES / _STATES_NBYTES)
    return before + after + first + last
