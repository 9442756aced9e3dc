"""The duration of a step under a layout, part by part, from counted operations and bytes and rough speeds.

    compute        matrix products and attention of forward and backward; memory that kernels read and write
    recomputation  the same for recomputed blocks
    tp, cp, ep     activations sent while nothing else runs
    weights        gathers and reductions that computation does not hide; the ends of a step
    bubble         a pipeline's idle time
    optimizer      reads and writes of states

Microbatches of a pipeline follow one another; sends between its stages are hidden. The host takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_dist.axes import Axes
from hf_dist.estimate.activations import Activations
from hf_dist.estimate.hardware import Hardware, link_of
from hf_dist.estimate.layouts import Layout
from hf_dist.estimate.wire import Traffic
from hf_dist.sharding.group_axes import DENSE

__all__ = ["PARTS", "StepTime", "Sum", "step_time"]

PARTS = ("compute", "recomputation", "tp", "cp", "ep", "weights", "bubble", "optimizer")
_PASSES_FORWARD, _PASSES_BACKWARD = 2, 4
"""How often the saved tensors of a block are written or read."""
_PAIRWISE = ("ep", "cp")
_END_SHARE = 0.1
"""Share of the weight traffic per microbatch that nothing hides: the first gather and the last reduction."""


@dataclass(frozen=True)
class Sum:
    """What one rank computes in a microbatch."""

    forward: float
    """Seconds of a forward; backward takes twice that."""
    again: float
    """Seconds of recomputed blocks."""

    @classmethod
    def of(cls, found: Activations, recomputed: str, hardware: Hardware) -> Sum:
        """`found`: the whole model, on one rank of `tp` and `cp`; `recomputed`: one of `layouts.RECOMPUTED`."""
        flops = found.rest.flops + sum(block.work.flops for block in found.blocks)
        saved = found.outside + sum(block.saved for block in found.blocks)
        forward = flops / hardware.flops + _PASSES_FORWARD * saved / hardware.memory
        again = 0.0
        if recomputed != "nothing":
            again = _PASSES_FORWARD * sum(block.saved - block.input for block in found.blocks) / hardware.memory
        if recomputed == "blocks":
            again += sum(block.work.flops for block in found.blocks) / hardware.flops
        backward = 2 * flops / hardware.flops + _PASSES_BACKWARD * saved / hardware.memory
        return cls((forward + backward) / 3, again)

    def shared(self, stages: int) -> Sum:
        """The computation of one of `stages` equal stages."""
        return Sum(self.forward / stages, self.again / stages)


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

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(self.parts[name] for name in ("tp", "cp", "ep", "weights"))


def step_time(
    work: Sum, traffic: Traffic, axes: Axes, layout: Layout, hardware: Hardware, *, bubble: float, states: int
) -> StepTime:
    """`traffic`: of a rank in a step; `bubble`: the schedule's share; `states`: bytes that a step reads and writes."""
    seconds: dict[str, float] = {}
    inside = between = 0
    sent: dict[str, int] = {}
    for axis, crossed in traffic.items():
        link = link_of(axes, axis, hardware.ranks_per_machine)
        nbytes, count = sum(n for _, n in crossed.values()), sum(c for c, _ in crossed.values())
        here, away = link.split(nbytes, pairwise=axis in _PAIRWISE)
        inside, between = inside + here, between + away
        sent[axis] = nbytes
        seconds[axis] = max(here / hardware.inside, away / hardware.between) + count * hardware.latency
    number = layout.microbatches
    compute = 3 * work.forward * number
    again = work.again * number
    beside = (compute + again) if layout.pp == 1 else (compute + again) / number
    weights = sum(seconds.get(name, 0.0) for name in ("shard", "edp", *(axis for axis, _ in DENSE)))
    ends = weights / max(1, number) * _END_SHARE
    parts = {
        "compute": compute,
        "recomputation": again,
        "tp": seconds.get("tp", 0.0),
        "cp": seconds.get("cp", 0.0),
        "ep": seconds.get("ep", 0.0),
        "weights": max(0.0, weights - beside) + ends + seconds.get("dp", 0.0),
        "bubble": 0.0,
        "optimizer": 2 * states / hardware.memory,
    }
    busy = sum(parts[name] for name in ("compute", "recomputation", "tp", "cp", "ep"))
    parts["bubble"] = busy * bubble / (1 - bubble)
    return StepTime(parts, bubble, inside, between, sent)
