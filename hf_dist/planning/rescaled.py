"""Scales measured activations to other numbers of rows and positions: everything but attention grows with the tokens."""

from __future__ import annotations

from dataclasses import replace

from hf_dist.planning.activations import Activations, Block, Work
from hf_dist.planning.sliced import Crossed, EarlySum

__all__ = ["rescaled"]


def rescaled(found: Activations, measured: int, *, rows: int, own: int, whole: int) -> Activations:
    """`found` of one row of `measured` tokens, scaled to `rows` rows of which this rank has `own` of `whole` tokens."""
    factor = rows * own / measured
    attention = factor * whole / measured  # every rank reads the keys of whole rows

    def crossed(sent: Crossed) -> Crossed:
        return {op: (count, round(factor * nbytes)) for op, (count, nbytes) in sent.items()}

    def work(of: Work) -> Work:
        inside = sum(call.flops for call in of.attention)
        calls = [replace(call, rows=rows, length=own, flops=round(attention * call.flops)) for call in of.attention]
        flops = round(factor * (of.flops - inside) + attention * inside)
        early = [EarlySum(*(round(factor * number) for number in each)) for each in of.early]
        moved = round(factor * of.moved), round(factor * of.fused)
        return Work(
            flops,
            *moved,
            calls,
            crossed(of.crossed),
            crossed(of.again),
            of.eights.scaled(factor),
            of.experts.scaled(factor),
            early,
        )

    def block(of: Block) -> Block:
        names = ("input", "saved", "saved_input", "largest", "costly", "mlp")
        sizes = {name: round(factor * getattr(of, name)) for name in names}
        return Block(of.path, **sizes, work=work(of.work))

    return replace(
        found,
        blocks=[block(each) for each in found.blocks],
        **{name: round(factor * getattr(found, name)) for name in ("before", "outside", "after", "largest_after")},
        rows=round(factor * found.rows),
        rest=work(found.rest),
        backward=crossed(found.backward),
    )
