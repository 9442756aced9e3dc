"""Tensors that HF collects inside blocks by hooks (router logits, hidden states) and returns with the output.

They are not part of the blocks' results, so each stage must send them to the next. The collector is
`transformers.utils.output_capturing._active_collector` (5.x). It is private, and looked up without an import because this
package does not depend on transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["active", "flatten", "restore"]


def active() -> dict[str, list[Any]]:
    """The lists that the current forward is filling, by output name; empty if nothing is collected. Local."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    found = collector.get() if collector is not None else None
    return {k: v for k, v in (found or {}).items() if isinstance(v, list)}


def flatten() -> tuple[tuple[tuple[str, int], ...], list[torch.Tensor]]:
    """((name, count), ...) and the tensors collected so far, in that order. Local."""
    lists = {name: values for name, values in active().items() if values}
    return tuple((name, len(values)) for name, values in lists.items()), [t for v in lists.values() for t in v]


def restore(layout: tuple[tuple[str, int], ...], tensors: list[torch.Tensor]) -> None:
    """Put the tensors collected on earlier stages into this process's lists. Local."""
    lists = active()
    rest = list(tensors)
    for name, count in layout:
        lists[name][:] = rest[:count]
        del rest[:count]
