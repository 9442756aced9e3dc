"""Bytes of 1-D, 2-D, 2.5-D and 3-D tensor parallelism for Llama-3, by the papers' algorithms: python -m
tests.parallel.tensor.higher

Of one layer, forward and backward, per rank, in bf16, with as many tokens per rank in every column: what a rank computes is
the same. T tokens, width h, sums I and O of what the layer's matrices take in and give out, W their elements:

    1-D     8 (p - 1) / p T h                                with sequence regions; between 8 ranks, other axes have the rest
    2-D     3 (q - 1) / q^2 (T I + W)                        SUMMA on q x q = p ranks, arXiv 2104.05343
    2.5-D   3 (q - 1) / q^2 (T I / d + W) + 2 (d - 1) / d W / q^2    q x q x d = p, weights d times, arXiv 2105.14500
    3-D     3 (l - 1) / p (T (I + O) + W)                    l x l x l = p, arXiv 2105.14450
"""

from __future__ import annotations

import math

from tests.scale.engines import LLAMA_3, Case

RANKS = (8, 16, 32, 64, 128, 256, 512)
TOKENS = 1024
"""Of a rank."""
INSIDE = 8
"""Ranks of a machine."""
BYTES = 2


def sizes(case: Case) -> tuple[int, int, int]:
    """(I, O, W) of a layer: queries with keys and values, output, gate with up, down."""
    width, inner = case.width, case.inner
    keys = width * case.kv_heads // case.heads
    matrices = [(width, width + 2 * keys), (width, width), (width, 2 * inner), (inner, width)]
    return sum(i for i, _ in matrices), sum(o for _, o in matrices), sum(i * o for i, o in matrices)


def sent(case: Case, ranks: int) -> dict[str, float | None]:
    """Bytes by kind; None where the ranks have no such shape. Of 2.5-D the best depth."""
    taken, given, weights = sizes(case)
    tokens = TOKENS * ranks
    few = min(ranks, INSIDE)
    found: dict[str, float | None] = {"1-D of 8": 8 * (few - 1) * TOKENS * case.width}
    found["1-D of all"] = 8 * (ranks - 1) * TOKENS * case.width
    q = math.isqrt(ranks)
    found["2-D"] = 3 * (q - 1) / ranks * (tokens * taken + weights) if q * q == ranks else None
    deep = []
    for d in (2, 4, 8):
        q = math.isqrt(ranks // d)
        if q * q * d == ranks and q > 1:
            moved = 3 * (q - 1) / q**2 * (tokens * taken / d + weights)
            deep.append(moved + 2 * (d - 1) / d * weights / q**2)
    found["2.5-D"] = min(deep, default=None)
    side = round(ranks ** (1 / 3))
    found["3-D"] = 3 * (side - 1) / ranks * (tokens * (taken + given) + weights) if side**3 == ranks else None
    return {kind: None if numel is None else BYTES * numel for kind, numel in found.items()}


def table() -> list[str]:
    """GB, as Markdown."""
    kinds = list(sent(LLAMA_3["8b"], 8))
    lines = [f"| Llama-3 | ranks | {' | '.join(kinds)} |", "|---|--:|" + "--:|" * len(kinds)]
    for model in ("70b", "405b"):
        for ranks in RANKS:
            cells = ["" if n is None else f"{n / 1e9:.2f}" for n in sent(LLAMA_3[model], ranks).values()]
            lines.append(f"| {model} | {ranks} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
