"""Compound optimizer states: objects that hold tensors and numbers, and tensors made of several tensors.

A checkpoint stores tensors and numbers by name. `leaves` lists those of a state as `key/attribute`; `put` sets them in a state
of the same structure. The optimizer recreates everything else in an object (None, text, functions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["is_part", "leaves", "put"]

_SEPARATOR = "/"


def leaves(state: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf. A value of the state that is not compound is a leaf of any type under its own key."""
    for key, value in state.items():
        parts = _parts(value)
        if parts is None:
            yield key, value
            continue
        for path, part in leaves(parts):
            if isinstance(part, (torch.Tensor, int, float)):
                yield f"{key}{_SEPARATOR}{path}", part


def put(state: object, path: str, value: object) -> None:
    """Set the leaf at `path`, whose containers must exist."""
    first, _, rest = path.partition(_SEPARATOR)
    if rest:
        put(state[first] if isinstance(state, dict) else _child(state, first), rest, value)
    elif isinstance(state, dict):
        state[first] = value
    elif isinstance(state, list):
        state[int(first)] = value
    elif isinstance(state, torch.Tensor):
        getattr(state, first).copy_(value)
    else:
        setattr(state, first, value)


def is_part(path: str) -> bool:
    """Whether `path` names a part of a compound state."""
    return _SEPARATOR in path


def _child(holder: object, name: str) -> object:
    return holder[int(name)] if isinstance(holder, (list, tuple)) else getattr(holder, name)


def _parts(value: object) -> dict[str, object] | None:
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        return None if flatten is None else {name: getattr(value, name) for name in flatten()[0]}
    if isinstance(value, (list, tuple)):
        return {str(i): part for i, part in enumerate(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else None
