"""A prepared model, held weakly, or what is left of it once it is dropped: a base model whose adapters were merged, a backbone
that somebody has put under another head."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["Remains"]


class Remains:
    """The outermost part of a model that is still there and has all its units."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """`parts`: the model, and what of it contains all units, from the outside in (`units.containers`)."""
        names = {id(module): name for name, module in parts[0].named_modules()}
        self._parts = [(weakref.ref(part), names[id(part)]) for part in parts]

    def _outermost(self) -> tuple[nn.Module, str]:
        for reference, name in self._parts:
            if (part := reference()) is not None:
                return part, name
        raise AssertionError("shards of a model that is gone")

    @property
    def model(self) -> nn.Module:
        """The outermost module still alive that contains every unit. A strong reference: hold it no longer than needed."""
        return self._outermost()[0]

    def buffers(self) -> dict[str, torch.Tensor]:
        """By the names that they have in the whole model."""
        part, name = self._outermost()
        return dict(part.named_buffers(prefix=name))
