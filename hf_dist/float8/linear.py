"""Linear layers that multiply in eight bits: torchao's `Float8Linear`, and the same for GPT-2's transposed layers.

A layer changes its class, so it stays the same module with the same parameters. `plain` changes it back for a while.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["become_float8", "is_float8", "is_linear", "plain"]

_PREFIX = "Float8"
_SET = ("config", "linear_mm_config")
"""What the forward of a converted layer reads."""


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer with the stock forward: torch's, or `Conv1D` of transformers, which has (in, out)."""
    cls = type(module)
    if isinstance(module, nn.Linear):
        return cls.forward is nn.Linear.forward and "forward" not in vars(module)
    return _is_transposed(cls) and "forward" not in vars(module)


def _is_transposed(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_float8(module: nn.Module) -> bool:
    """Whether `module` was converted."""
    return type(module).__name__.startswith(_PREFIX) and all(hasattr(module, key) for key in _SET)


def become_float8(layer: nn.Module, recipe: Any) -> None:
    """Convert one layer in place. Local. `recipe`: torchao's `Float8LinearConfig`."""
    linear = _torchao()
    # From torchao, on a layer without elements: what its constructor sets, whatever that is in this version.
    with torch.device("meta"):
        made = linear.Float8Linear(16, 16, bias=False, config=recipe)
    names = {key for key in vars(made) if key not in vars(nn.Linear(1, 1, device="meta"))}
    _change(layer, linear.Float8Linear if isinstance(layer, nn.Linear) else _transposed(type(layer)))
    vars(layer).update({key: value for key, value in vars(made).items() if key in names})


def _change(layer: Any, kind: Any) -> None:
    layer.__class__ = kind


def _torchao() -> Any:
    return importlib.import_module("torchao.float8.float8_linear")


_transposed_classes: dict[type, type] = {}


def _transposed(cls: type) -> type:
    if cls not in _transposed_classes:
        _transposed_classes[cls] = _new_transposed(cls)
    return _transposed_classes[cls]


def _new_transposed(cls: type) -> type:
    linear = _torchao()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """The product with a weight of (in, out), which torchao's function takes as it is."""
        out: torch.Tensor = linear.matmul_with_hp_or_float8_args.apply(
            x, self.weight, self.linear_mm_config, self.config
        )
        return out + self.bias.to(out.dtype)

    return type(f"{_PREFIX}{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Inside, converted layers of `model` multiply as they did before, for what looks at a model's structure. Local."""
    found = {module: type(module) for module in model.modules() if is_float8(module)}
    for module, kind in found.items():
        _change(module, nn.Linear if isinstance(module, nn.Linear) else kind.__mro__[1])
    try:
        yield
    finally:
        for module, kind in found.items():
            _change(module, kind)
