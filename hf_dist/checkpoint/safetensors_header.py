"""The header of a safetensors file and the index beside several, checked: a file may be cut off, or made to mislead.

Source of the format: the safetensors README (8 bytes little endian header length, JSON header, data without holes).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hf_dist.checkpoint.folder import is_inside
from hf_dist.checkpoint.weight_plan import TORCH_DTYPES
from hf_dist.errors import CheckpointError

__all__ = ["Header", "files_of_index", "read_header"]

_LONGEST = 100_000_000
"""Bytes; safetensors' own limit."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    raw: bytes
    tensors: dict[str, dict[str, Any]]
    """Name -> dtype, shape, data_offsets."""
    begin: int
    """First byte of the data."""


def read_header(path: Path) -> Header:
    """The checked header. Raises `CheckpointError` with the file's name and the reason.

    Refused: what is no safetensors file; shapes and offsets that are no whole numbers from zero, that do not fit each other,
    that overlap or leave holes; data that are longer or shorter than described.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST):
                raise ValueError(f"it is none, or is cut off ({size} bytes)")
            raw = file.read(length)
        described = json.loads(raw)
        if not isinstance(described, dict):
            raise ValueError("its header is no object")
        described.pop("__metadata__", None)
        _check(described, size - 8 - length)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    return Header(raw, described, 8 + length)


def _check(tensors: dict[str, object], nbytes: int) -> None:
    spans = []
    for name, entry in tensors.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{name} is described by {entry!r}")
        shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
        if not _are_whole(shape) or not _are_whole(offsets) or len(offsets) != 2 or not isinstance(dtype, str):
            raise ValueError(f"{name} has dtype {dtype!r}, shape {shape!r} and data_offsets {offsets!r}")
        first, last = offsets
        if dtype in TORCH_DTYPES and last - first != math.prod(shape) * TORCH_DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {last - first} bytes, not {tuple(shape)} of {TORCH_DTYPES[dtype]}")
        spans.append((first, last, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end or last < first:
            raise ValueError(f"the data of {name} begin at byte {first}, those before end at {end}")
        end = last
    if end != nbytes:
        what = "the file is truncated: download it again" if end > nbytes else "there is more than it describes"
        raise ValueError(f"it has {nbytes} bytes of data, its header describes {end}: {what}")


def _are_whole(numbers: object) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def files_of_index(path: Path) -> set[str]:
    """The files that a `*.index.json` names. Raises `CheckpointError` if it cannot be read or names one outside its folder."""
    try:
        found = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        for name in found:
            if not is_inside(name):
                raise ValueError(f"it names {name!r}, which is no file of its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    return found
