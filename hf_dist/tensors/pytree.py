"""Tensors inside what users pass: containers, as torch's pytree knows them, and every other mapping.

Torch's pytree takes a mapping that is no dict for one leaf. Such are a tokenizer's `BatchEncoding`, which the standard
collators return, an image processor's `BatchFeature`, and a subclass of dict. A batch therefore goes through here.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["copied", "leaves", "mapped"]


def leaves(value: object) -> list[Any]:
    """The leaves of `value`, in the order in which `mapped` visits them."""
    found = tree_leaves(value)
    if not any(isinstance(leaf, Mapping) for leaf in found):
        return found
    inside = (leaves(list(leaf.values())) if isinstance(leaf, Mapping) else [leaf] for leaf in found)
    return [leaf for part in inside for leaf in part]


def mapped(function: Callable[[object], object], value: object) -> Any:
    """A copy of `value` with `function` of each leaf; classes and their attributes stay, for the user's model reads them."""
    return tree_map(lambda leaf: _mapped(function, leaf) if isinstance(leaf, Mapping) else function(leaf), value)


def copied(batch: object, **more: object) -> Any:
    """A mapping of the same class, from which keys can be removed, with `more`; anything else is returned as it is."""
    return _rebuilt(batch, {**batch, **more}) if isinstance(batch, Mapping) else batch


def _mapped(function: Callable[[object], object], mapping: Mapping[object, object]) -> object:
    return _rebuilt(mapping, {key: mapped(function, item) for key, item in mapping.items()})


def _rebuilt(mapping: Mapping[object, object], items: dict[Any, object]) -> object:
    # A copy of another class may share its items, so its class is called, as the Trainer does.
    if not isinstance(mapping, dict | UserDict):
        return type(mapping)(items)  # type: ignore[call-arg]
    result = copy.copy(mapping)
    for key, item in items.items():
        result[key] = item
    return result
