"""Sizes that a model's code reads (heads, columns, groups of queries), as one rank of a split has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.plan import SplitPlan, pattern_of, stock_name
from hf_dist.parallel.tensor.slices import KEY, Kept

__all__ = ["LocalSize", "local_sizes"]


@dataclass(frozen=True)
class LocalSize:
    """An attribute of a module, for the whole model and for this rank's part."""

    module: weakref.ref[nn.Module]
    attribute: str
    whole: object
    here: object

    def show(self, whole: bool) -> None:
        """Make the module report one of the two. Local."""
        setattr(self.module(), self.attribute, self.whole if whole else self.here)


def local_sizes(
    modules: Mapping[str, nn.Module], plan: SplitPlan, ranks: int, kept: Callable[[str], Kept | None]
) -> list[LocalSize]:
    """All such attributes of `modules`, by path. `kept(path)`: what is kept of a module's weight.

    Raises `ModelError` for sizes that `ranks` does not divide.
    """
    found: list[LocalSize] = []
    for pattern, attribute in sorted(plan.divided):
        for name, module in modules.items():
            value = getattr(module, attribute, None)
            if pattern_of(name) == pattern and isinstance(value, int):
                if value % ranks:
                    raise ModelError(f"{KEY}: {ranks} does not divide {name}.{attribute} ({value})")
                found.append(LocalSize(weakref.ref(module), attribute, value, value // ranks))
    for name, module in modules.items():
        is_stock = stock_name(name) == name and ".lora_" not in name  # in an adapted layer, the wrapper
        own = kept(name) if is_stock else None
        if own is not None:
            found += _of_weight(module, own)
            if own.sharing > 1:
                path = name.rpartition(".")[0]
                found.append(_query_groups(path, modules[path], own, ranks))
    return found


def _of_weight(module: nn.Module, own: Kept) -> list[LocalSize]:
    base: Any = getattr(module, "base_layer", module)
    found: list[LocalSize] = []
    if type(base).__name__ == "Conv1D":
        found.append(LocalSize(weakref.ref(base), "nf", base.nf, own.held.shape[1]))
    if isinstance(base, nn.Embedding) and base.padding_idx is not None and own.held.shape[0] != own.held.whole[0]:
        ((first, last),) = own.held.ranges[0]
        here = base.padding_idx - first if first <= base.padding_idx < last else None
        found.append(LocalSize(weakref.ref(base), "padding_idx", base.padding_idx, here))
    return found


def _query_groups(path: str, parent: Any, own: Kept, ranks: int) -> LocalSize:
    """Of an attention whose ranks share key-value heads."""
    if parent.num_key_value_groups % own.sharing:
        raise ModelError(f"{KEY}: {ranks} does not divide the heads of the queries of {path}")
    groups = parent.num_key_value_groups
    return LocalSize(weakref.ref(parent), "num_key_value_groups", groups, groups // own.sharing)
