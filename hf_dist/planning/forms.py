"""In which form messages are sent, along which axis: lines for the start-up report and `hf-dist plan`."""

from __future__ import annotations

from collections.abc import Iterator

from hf_dist.dist.axes import Axes
from hf_dist.planning.state_bytes import States
from hf_dist.tensors.codecs import Codec

__all__ = ["form_lines"]


def form_lines(states: States, axes: Axes) -> list[str]:
    """A line for each kind of message that is encoded: what, along which axis, in which codec; empty if none is."""
    lines = [f"{what} along {axis}: {codec}{more}" for what, axis, codec, more in _rows(states, axes)]
    if lines and states.placements.wires.feedback:
        lines.append("what a reduction leaves out is added to the next one")
    return lines


def _rows(states: States, axes: Axes) -> Iterator[tuple[str, str, Codec | str, str]]:
    """(what is sent, axis, codec, in which way)."""
    trained = [g.at_rest for g in states.groups if g.trainable]
    frozen = [g.at_rest for g in states.groups if not g.trainable]
    kept = any(g.second is not None and g.wires.second for g in (*trained, *frozen))
    second = ", the second copy as well" if kept else ""
    for what, groups in (("weights", trained), ("frozen weights", frozen)):
        if own := next((g.wires for g in groups if g.wires.weights is not None), None):
            named = f"{what} that multiply in float8" if own.of_products else what
            yield named, "shard", str(own.weights), second
    if codec := next((g.wires.gradients for g in trained if g.wires.gradients is not None), None):
        hops = f", in two hops: {states.near} ranks of a machine, then machines" if states.near > 1 else ""
        yield "gradients", "shard", codec, hops
    wires = states.placements.wires
    if wires.low_rank is not None and any(g.wires.low_rank is not None for g in trained):
        form = wires.low_rank
        since = f", after {form.start} steps" if form.start else ""
        yield "gradients", "shard", f"two factors of rank {form.rank} (PowerSGD)", since
    if wires.momentum is not None:
        yield "momentum in place of gradients, after the warm-up", "shard", wires.momentum, ""
    if wires.stages is not None and axes.size("pp") > 1:
        yield "hidden states and their gradients", "pp", wires.stages, ""
    if wires.meetings is not None and states.config.local_sgd.enabled and axes.size("dp_replicate") > 1:
        yield "movements", "dp_replicate", wires.meetings, ""
    between = axes.size("dp_replicate") > 1 and not states.config.local_sgd.enabled
    codec = next((g.wires.copies for g in trained if g.wires.copies is not None), None)
    if between and codec is not None:
        cut = any(g.is_cut for g in trained)
        yield "gradients and weights" if cut else "gradients", "dp_replicate", codec, ""
