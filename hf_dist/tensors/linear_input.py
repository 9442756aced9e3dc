"""An input that overrides `functional.linear`, so that a stock linear layer computes its product in another way.

A forward pre-hook marks the input; the module's own forward calls `functional.linear` with it. Any other function receives a
plain tensor, so the mark does not spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

__all__ = ["LinearInput"]

Answer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LinearInput(torch.Tensor):
    """Activations that enter a linear layer."""

    _answer: Answer

    @staticmethod
    def of(tensor: torch.Tensor, answer: Answer) -> LinearInput:
        """`tensor`, marked so that `linear` of it returns `answer(tensor, weight, bias)`."""
        marked = tensor.as_subclass(LinearInput)
        marked._answer = answer
        return marked

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear:
                x, weight, bias = _arguments(*args, **(kwargs or {}))
                if (
                    isinstance(x, LinearInput)
                    and not isinstance(weight, LinearInput)
                    and not isinstance(bias, LinearInput)
                ):
                    return x._answer(x.as_subclass(torch.Tensor), weight, bias)
            args, kwargs = tree_map(_plain, (args, kwargs or {}))
            return func(*args, **kwargs)


def _arguments(input: object, weight: object, bias: object = None) -> tuple[object, Any, Any]:
    """Of `functional.linear`, however a caller names them."""
    return input, weight, bias


def _plain(value: object) -> object:
    return value.as_subclass(torch.Tensor) if isinstance(value, LinearInput) else value
