"""Sizes in messages: three digits in powers of 1000, the units of disks, `max_shard_size` and `memory_budget`."""

from __future__ import annotations

__all__ = ["scaled", "size_text"]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ROUNDS_UP = 0.9995
"""From this fraction of the next unit on, three digits use that unit: 999.6 kB is 1 MB."""


def scaled(number: float) -> str:
    """`number` with three digits, a space and the SI prefix, such as `37 k` or `1.24 G`."""
    for factor, prefix in _PREFIXES:
        if abs(number) >= _ROUNDS_UP * factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "


def size_text(nbytes: float) -> str:
    """A number of bytes, such as `80 GB`, `1.24 MB` or `512 B`."""
    return f"{scaled(nbytes)}B"
