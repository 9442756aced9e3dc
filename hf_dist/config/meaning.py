"""What each key means, from the sentence under its field in the code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hf_dist.config.rows import Status
from hf_dist.config.schema import fields
from hf_dist.config.support import SUPPORT


@cache
def sentences() -> Mapping[str, str]:
    """JSON path -> the sentence under its field, without the path at its start."""
    return {path: _words(info.description or "") for path, info in fields().items()}


def meaning(path: str) -> str:
    """What the key does: its sentence, or the entry of the support table; empty for an unknown key."""
    row = SUPPORT.get(path)
    if path in sentences():
        return sentences()[path]
    if row is None:
        return ""
    if row.status is Status.MAPPED:
        return f"another spelling of {row.target}"
    if row.status is Status.NO_EFFECT:
        return f"no effect: {row.reason}"
    if row.status is Status.REFUSED:
        return f"{row.reason}. {row.fix}"
    return "an argument of the optimizer" if path.startswith("optimizer.") else "an argument of the schedule"


def _words(sentence: str) -> str:
    return sentence.rpartition("`: ")[2] if sentence.startswith("`") else sentence
