"""Near misses: how far two names are apart, and which known name was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name at most two edits away (fewer for short names), or None; case and hyphens count as no edit."""
    limit = 0 if len(name) < 3 else min(2, max(1, len(name) // 3))
    plain = _plain(name)
    near = [other for other in known if abs(len(other) - len(name)) <= limit]
    # Of two that are as far, the one with more of the same letters: `pf16` is fp16, not bf16.
    ranked = sorted((distance(plain, _plain(other)), -len(set(plain) & set(_plain(other))), other) for other in near)
    return ranked[0][2] if ranked and ranked[0][0] <= limit else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy for a name that is not among `known`: the one that was probably meant, else `otherwise`."""
    meant = closest(name, known)
    return f'Did you mean "{meant}"?' if meant else otherwise


def distance(a: str, b: str) -> int:
    """Edits that turn `a` into `b`: insertion, deletion, replacement, swap of two neighbours."""
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, previous = previous, row
    return previous[-1]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
