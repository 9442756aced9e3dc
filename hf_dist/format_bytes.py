"""Sizes and durations in messages: three digits in powers of 1000, the units of disks, `max_shard_size` and `memory_budget`."""

from __future__ import annotations

__all__ = ["scaled", "seconds_text", "size_text"]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PARTS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
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


def seconds_text(seconds: float) -> str:
    """A duration, such as `1250 s`, `12.4 s`, `3.21 ms` or `45 µs`."""
    size = abs(seconds)
    factor, unit = next((pair for pair in _PARTS if size >= _ROUNDS_UP * pair[0]), _PARTS[-1])
    number = seconds / factor
    return f"{number:.0f} {unit}" if abs(number) >= 999.5 else f"{number:.3g} {unit}"
