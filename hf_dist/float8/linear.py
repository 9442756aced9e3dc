"""Linear layers that multiply in eight bits: torchao's `Float8Linear`, and the same for GPT-2's transposed layers.

A layer changes its class, so it stays the same module with the same parameters. `plain` changes it back for a while.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_dist.float8.blocks import is_mxfp8, stock_class
from hf_dist.float8.casts import Kept
from hf_dist.float8.product import prepare_product, product
from hf_dist.float8.stacks import is_float8_stack

__all__ = ["become_float8", "is_float8", "is_linear", "make_plain", "plain"]

_MARK = "_float8_linear_of"
"""Attribute of classes of converted layers: the class that the layer had."""


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer with the stock forward: torch's, or `Conv1D` of transformers, which has (in, out)."""
    cls = type(module)
    if isinstance(module, nn.Linear):
        return cls.forward is nn.Linear.forward and "forward" not in vars(module)
    return _is_transposed(cls) and "forward" not in vars(module)


def _is_transposed(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_float8(module: nn.Module) -> bool:
    """Whether `module` was converted here; a layer that a user gave torchao is another."""
    return _MARK in vars(type(module))


def become_float8(layer: nn.Module, recipe: Any) -> None:
    """Convert one layer in place. Local. `recipe`: torchao's `Float8LinearConfig`."""
    linear = _torchao()
    prepare_product()
    # From torchao, on a layer without elements: what its constructor sets, whatever that is in this version.
    with torch.device("meta"):
        made = linear.Float8Linear(16, 16, bias=False, config=recipe)
    names = {key for key in vars(made) if key not in vars(nn.Linear(1, 1, device="meta"))}
    cls: Any = type(layer)
    _change(layer, _straight(cls) if isinstance(layer, nn.Linear) else _transposed(cls))
    vars(layer).update({key: value for key, value in vars(made).items() if key in names})
    vars(layer)["kept"] = Kept()


def _change(layer: Any, kind: Any) -> None:
    layer.__class__ = kind


def _torchao() -> Any:
    return importlib.import_module("torchao.float8.float8_linear")


@functools.cache
def _straight(cls: Any) -> type:
    stock = _torchao().Float8Linear

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """torchao's, with the casts of the weight that are kept, if any."""
        if torch.is_autocast_enabled():
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = product(self, x, self.weight.t())
        return out if self.bias is None else out + self.bias.to(out.dtype)

    # A subclass with the stock forward keeps its other methods.
    bases = (stock,) if cls is nn.Linear else (stock, cls)
    return type(f"Float8{cls.__name__}", bases, {"forward": forward, "__module__": __name__, _MARK: cls})


@functools.cache
def _transposed(cls: Any) -> type:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """The product with a weight of (in, out), which torchao's function takes as it is."""
        out = product(self, x, self.weight.view_as(self.weight))
        return out + self.bias.to(out.dtype)

    return type(f"Float8{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__, _MARK: cls})


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Inside, converted layers of `model` multiply as they did before, for what looks at a model's structure. Local."""
    found = make_plain(model)
    try:
        yield
    finally:
        for module, kind in found.items():
            _change(module, kind)


def make_plain(model: nn.Module) -> dict[nn.Module, type]:
    """Give converted layers of `model` their stock classes; returns those that they had. Local."""
    kinds = (is_float8, is_mxfp8, is_float8_stack)
    found = {module: type(module) for module in model.modules() if any(is_one(module) for is_one in kinds)}
    for module, kind in found.items():
        _change(module, vars(kind).get(_MARK) or stock_class(kind) or kind.__mro__[1])
    return found
