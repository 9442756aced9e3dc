"""Bytes that activations send in one step of one rank, by axis: split products, shared sequences, stages, experts.

    tp   crossings, counted on meta (`sliced.py`), and three numbers per row if the vocabulary is split
    cp   queries, keys, values and outputs of attention, by its layout (`parallel/sequence/layout.py`)
    pp   hidden states to the next stage, and their gradient to the previous one
    ep   rows to the experts and back; an estimate with even routing (`expert_traffic.py`)

Exact for rows without padding, except `ep` and unequal stages. Covers forward and backward of every microbatch, and
recomputed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_dist.config import DistConfig
from hf_dist.dist.axes import Axes
from hf_dist.memory.activation.checkpoint import asks_for_checkpointing
from hf_dist.parallel.sequence.layout import SequenceLayout
from hf_dist.planning.activations import Activations, AttentionCall, Block
from hf_dist.planning.comm_volume import Traffic
from hf_dist.planning.sliced import Crossed, add, merged
from hf_dist.sharding.precision import DTYPES
from hf_dist.sharding.wires import wires_for

__all__ = ["layer_traffic", "recomputed_blocks", "shared"]

_LOSS_NBYTES = 12
"""Bytes per row of split logits: the maximum, the sum and the target's logit, in fp32."""


def recomputed_blocks(found: Activations, config: DistConfig, checkpointing: bool = False) -> list[bool]:
    """Which blocks are recomputed in backward."""
    asked, every = asks_for_checkpointing(config)
    on = asked or checkpointing
    return [on and (every is None or i % every == 0) for i in range(len(found.blocks))]


def layer_traffic(
    found: Activations,
    axes: Axes,
    config: DistConfig,
    *,
    microbatches: int,
    layout: SequenceLayout | None = None,
    checkpointing: bool = False,
) -> Traffic:
    """Traffic of one rank. `found`: one microbatch in all layers; `layout`: how `cp` shares sequences.

    A pipeline rank gets an equal share, and sends its hidden states to both neighbours: of two ranks, one has the model's
    begin, which gets no gradient of its input sent back, and one its end.
    """
    again = recomputed_blocks(found, config, checkpointing)
    traffic: Traffic = {}
    if axes.size("tp") > 1:
        traffic["tp"] = _of_slices(found, again, axes.size("tp"))
    if layout is not None:
        traffic["cp"] = _of_sequence(found.blocks, again, layout)
    stages = axes.size("pp")
    traffic = {axis: shared(own, microbatches, stages) for axis, own in traffic.items()}
    if stages > 1:
        sends = microbatches * (2 * config.pipeline.virtual_stages - (stages == 2))
        largest = max((block.input for block in found.blocks), default=0)
        traffic["pp"] = {"send": (sends, sends * _of_stages(largest, found.rows, config))}
    return traffic


def _of_stages(nbytes: int, tokens: int, config: DistConfig) -> int:
    """Bytes of hidden states of `nbytes` between two stages: encoded by token, unless that is more (`Freight`)."""
    codec = wires_for(config).stages
    if codec is None or not tokens:
        return nbytes
    width = nbytes // tokens
    return tokens * min(width, codec.nbytes(width // DTYPES[config.dtype].itemsize))


def _of_slices(found: Activations, again: Sequence[bool], size: int) -> Crossed:
    parts = [found.rest.crossed, found.backward, *(block.work.crossed for block in found.blocks)]
    parts += [block.work.again for block, runs in zip(found.blocks, again, strict=True) if runs]
    crossed = merged(*parts)
    for numbers in (4, _LOSS_NBYTES - 4) if found.cuts_vocabulary else ():
        add(crossed, "all_reduce", 2 * (size - 1) * numbers * found.rows // size)
    return crossed


def _of_sequence(blocks: Sequence[Block], again: Sequence[bool], layout: SequenceLayout) -> Crossed:
    crossed: Crossed = {}
    inner, outer = layout.ulysses, layout.outer
    for block, runs in zip(blocks, again, strict=True):
        for call in block.work.attention:
            position = call.rows * call.length * call.widths
            keys = position * _copies(call, inner)
            forwards = 2 if runs else 1
            if inner > 1:
                whole = (position * call.heads + keys) * call.itemsize
                add(crossed, "all_to_all", (1 + forwards) * (inner - 1) * whole // inner, 2 * (1 + forwards))
            if (
                outer > 1 and layout.is_ring
            ):  # in backward they go round the ring again, and their fp32 gradients all the way
                passed = (1 + forwards) * (outer - 1) * call.itemsize + 4 * outer
                add(crossed, "shift", passed * keys, 0)
            elif outer > 1:
                add(crossed, "all_gather", forwards * (outer - 1) * keys * call.itemsize, 2 * forwards)
                add(crossed, "reduce_scatter", (outer - 1) * keys * call.itemsize, 2)
    return crossed


def _copies(call: AttentionCall, ranks: int) -> int:
    """Key heads, replicated until `ranks` can share them (`parallel/sequence/attention.py`)."""
    own = call.key_heads
    if own % ranks == 0:
        return own
    return own * (ranks // own) if ranks % own == 0 else call.heads


def shared(crossed: Crossed, times: int, parts: int) -> Crossed:
    """`crossed` repeated `times` times, divided over equal `parts`, one of which belongs to a rank."""
    return {op: (-(-times * count // parts), times * nbytes // parts) for op, (count, nbytes) in crossed.items()}
