"""Near misses: the distance between two names, the words they share, and which known name was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_SHORT = {
    "ckpt": ("checkpoint",),
    "lr": ("learning", "rate"),
    "wd": ("weight", "decay"),
    "bs": ("batch", "size"),
    "device": ("gpu",),
    "devices": ("gpu",),
    "gpus": ("gpu",),
    "optimisation": ("optimization",),
    "optimiser": ("optimizer",),
}
"""Words that people use in place of others."""
_ANYWHERE = frozenset(
    {
        "size",
        "num",
        "number",
        "type",
        "per",
        "max",
        "min",
        "steps",
        "step",
        "use",
        "enable",
        "enabled",
        "name",
        "path",
        "config",
    }
)
"""Words that say little about a name's subject."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name at most two edits away (fewer for short names), or None. Case and hyphens are not counted."""
    limit = 0 if len(name) < 3 else min(2, max(1, len(name) // 3))
    plain = _plain(name)
    near = [other for other in known if abs(len(other) - len(name)) <= limit]
    # If two are equally far, prefer more common letters: `pf16` is fp16, not bf16.
    ranked = sorted((distance(plain, _plain(other)), -len(set(plain) & set(_plain(other))), other) for other in near)
    return ranked[0][2] if ranked and ranked[0][0] <= limit else None


def begun(name: str, known: Iterable[str]) -> str | None:
    """The shortest known name that begins with `name`, if `name` has five letters or more."""
    return min((other for other in known if len(name) > 4 and other.startswith(name)), key=len, default=None)


def same_words(name: str, known: Iterable[str]) -> str | None:
    """The known name with the same words in any order and form (`clip_grad`: `gradient_clipping`), or None."""
    return _by_words(name, known, lambda words, others, shared: len(words) == len(others) == shared)


def nearly_same_words(name: str, known: Iterable[str]) -> str | None:
    """The known name with one word more or less, if two are shared; or with all words of `name`, if it has three or more."""
    return _by_words(
        name,
        known,
        lambda words, others, shared: (
            (abs(len(words) - len(others)) == 1 and shared == min(len(words), len(others)))
            or (3 <= len(words) == shared < len(others))
        ),
    )


def _by_words(name: str, known: Iterable[str], fits: Callable[[list[str], list[str], int], bool]) -> str | None:
    words = _words(name)
    found = []
    for other in known if len(words) > 1 else ():
        others = _words(other)
        shared = _shared(words, others)
        telling = [word for word in shared if word not in _ANYWHERE]
        if len(shared) > 1 and telling and fits(words, others, len(shared)):
            found.append((distance(name, other), other))
    return min(found)[1] if found else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy for a name that is not in `known`: the name that was probably meant, else `otherwise`."""
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


def _words(name: str) -> list[str]:
    found = (word.lower() for word in _WORDS.findall(name))
    return [word for each in found for word in _SHORT.get(each, (each,))]


def _shared(words: list[str], others: list[str]) -> list[str]:
    """Words of the first list that the second also has, each once."""
    left, shared = list(others), []
    for word in words:
        match = next((other for other in left if _is_same(word, other)), None)
        if match is not None:
            left.remove(match)
            shared.append(word)
    return shared


def _is_same(a: str, b: str) -> bool:
    """Whether two words match, like `grad` and `gradient`: one is a prefix, or both start with the same five letters."""
    short, long = sorted((a, b), key=len)
    return a == b or (len(short) >= 3 and long.startswith(short)) or (len(short) > 5 and short[:5] == long[:5])
