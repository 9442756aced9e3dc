"""Another draw of a run's rounding: the same step with rows in another order, weights a rounding away, products in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["DRAWS", "InParts", "in_another_order", "in_parts", "moved"]

DRAWS = 3
"""One alone may be near by chance: the norm of Gemma 4 at 9e-5, 2e-3 and 6e-3 in fp32."""
Item = TypeVar("Item")


def in_another_order(rows: Sequence[Item], step: int, draw: int) -> list[Item]:
    """Rows of steps of `step` rows each, those of each step in another order; the first draw is the reverse one."""
    generator = torch.Generator().manual_seed(draw)
    order = list(reversed(range(step))) if draw == 1 else torch.randperm(step, generator=generator).tolist()
    return [rows[i + at] for i in range(0, len(rows), step) for at in order if i + at < len(rows)]


@torch.no_grad()
def moved(model: nn.Module, draw: int) -> None:
    """Move all weights by up to a unit in the last place of fp32: a net of kinks then tells how far rounding takes it."""
    generator = torch.Generator().manual_seed(draw - 1)
    for p in model.parameters():
        if p.is_floating_point():
            p.mul_(1 + 2**-23 * (2 * torch.rand(p.shape, generator=generator) - 1))


def in_parts(draw: int) -> AbstractContextManager[object]:
    """Inside, products of matrices are made in parts. `draw`: 0 for products as they are."""
    return InParts(draw) if draw else nullcontext()


class InParts(TorchFunctionMode):
    """Inside, each product with a weight is a sum of two, and so is its gradient: each part is rounded, and the sum.

    Any layout that cuts matrices rounds so. In half precision neither other rows nor weights a unit of fp32 away change what a
    row's forward rounds: without this a ReLU near zero, or a token between two experts, falls to the same side in every draw.
    """

    def __init__(self, draw: int) -> None:
        super().__init__()
        self._quarters = 1 + (draw - 1) % 3

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """`func`; in parts, if it is a product with a weight."""
        if func is nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.addmm and not kwargs and args[2].dim() == 2:  # transformers' Conv1D
            bias, x, weight = args
            return self._linear(x, weight.t(), bias)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Parts of the inputs are summed here; parts of the outputs are summed in the gradient of `input`."""
        if weight.dim() != 2:
            return nn.functional.linear(input, weight, bias)
        halves = [self._product(input, part) for part in self._cut(weight, 0)]
        found = torch.cat(halves, dim=-1)
        return found if bias is None else found + bias

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        columns = self._cut(weight, 1)
        parts = torch.split(x, [part.shape[1] for part in columns], dim=-1)
        products = [nn.functional.linear(a, b) for a, b in zip(parts, columns, strict=True)]
        return sum(products[1:], start=products[0])

    def _cut(self, weight: Tensor, dim: int) -> tuple[Tensor, ...]:
        size = weight.shape[dim]
        first = size * self._quarters // 4
        return torch.split(weight, [first, size - first], dim) if first else (weight,)
