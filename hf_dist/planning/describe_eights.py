"""Products in float8 as lines: their share of the operations, and what they save, or cost, beside bf16."""

from __future__ import annotations

from hf_dist.format_bytes import seconds_text

__all__ = ["eights_line"]


def eights_line(what: str, share: float, own: float, bf16: float, fused: float | None = None) -> str:
    """`what` takes `own` seconds, and `bf16` without float8; `fused`: if blocks were compiled, where they are not."""
    line = f"{share:.0%} of the operations multiply in float8: {what} takes {seconds_text(own)}, in bf16 {seconds_text(bf16)}"
    if own >= bf16:
        line += "; the casts take more than the products save"
    if fused is not None:
        line += f"; with compile.enabled, which makes each cast one kernel, {seconds_text(fused)}"
    return line
