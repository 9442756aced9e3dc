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
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if (
                func is functional.linear
                and isinstance(args[0], LinearInput)
                and not any(isinstance(other, LinearInput) for other in args[1:])
            ):
                bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
                return args[0]._answer(args[0].as_subclass(torch.Tensor), args[1], bias)
            args, kwargs = tree_map(_plain, (args, kwargs or {}))
            return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, LinearInput) else value
