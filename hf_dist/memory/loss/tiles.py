"""Cross-entropy of a linear head, some rows at a time, so that the logits of all rows never exist at once.

Forward also computes the gradients of hidden states and head, tile by tile, while a tile's logits exist; backward scales them.
This takes three matrix products, as in the plain version, and none of them twice. (Liger Kernel's
`fused_linear_cross_entropy` works in the same order; torch's `linear_cross_entropy` does not support operations between head
and loss, such as soft-capping.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from hf_dist.memory.loss.chunks import Cast, Computed, Elementwise
from hf_dist.memory.loss.vocabulary import VocabularySplit
from hf_dist.tensors.deferred_tensor import refuse_second_derivatives

TILE_BYTES = 1 << 29
"""Memory for one tile: logits and their gradient in the compute dtype and, on a CPU, the gradient in fp32."""
BYTES_PER_LOGIT = 8
_ROWS_MULTIPLE = 64


@dataclass(frozen=True)
class Linear:
    """A head whose product is deferred."""

    hidden: torch.Tensor  # (..., D)
    weight: torch.Tensor  # (V, D)
    bias: torch.Tensor | None  # (V,)
    after: tuple[Elementwise, ...] = ()
    """Element-wise operations that the model applies to the logits, in order."""
    split: VocabularySplit | None = None
    """How the vocabulary is split, if `weight` has some of its rows; None if it has all."""

    def rows(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Linear:
        """The same with `view` applied to the rows; `view` must not change the last dimension."""
        return replace(self, hidden=view(self.hidden))

    def full(self) -> torch.Tensor:
        """The logits of all rows, (..., V). Collective over the ranks of a split vocabulary."""
        return self.computed().full()

    def computed(self) -> Computed:
        """Compute the product now; the operations in `after` stay pending."""
        return Computed(functional.linear(self.hidden, self.weight, self.bias), self.after, self.split)

    @property
    def vocabulary(self) -> int:
        """Number of logit columns that exist at a time; equal on all ranks of a split vocabulary."""
        return self.weight.shape[0] if self.split is None else self.split.width


def tile_rows(vocabulary: int) -> int:
    """Rows of a tile: as many as fit into `TILE_BYTES`, rounded down to a multiple of 64 if possible."""
    rows = max(1, TILE_BYTES // (BYTES_PER_LOGIT * vocabulary))
    return rows - rows % _ROWS_MULTIPLE if rows > _ROWS_MULTIPLE else rows


@dataclass(frozen=True)
class _Job:
    """The arguments of `_TiledSum` that are not tensors of the graph."""

    loss_of: Callable[[torch.Tensor, slice], torch.Tensor]
    """The loss, 0D, of a tile's product (R, V) and its rows."""
    learns: bool
    over: Callable[[], None]
    rows: int
    """Rows of a tile."""


def tiled_cross_entropy(
    head: Linear, target: torch.Tensor, *, ignore_index: int, mean: bool, dtype: torch.dtype, over: Callable[[], None]
) -> torch.Tensor:
    """`cross_entropy(head.full(), target)` as a 0-dim tensor of `dtype`, for `head.hidden` (N, D) and `target` (N,).

    `mean`: average over targets other than `ignore_index`, else sum. Without such targets, the mean is nan and its gradient 0,
    as in torch. `over` is called when backward passes through. Collective over the ranks of a split vocabulary.
    """
    after: tuple[Elementwise, ...] = (*head.after, Cast(torch.promote_types(head.hidden.dtype, torch.float32)))

    def loss_of(product: torch.Tensor, at: slice) -> torch.Tensor:
        return Computed(product, after, head.split).cross_entropy(target[at], ignore_index=ignore_index, mean=False)

    total = tiled_sum(head, loss_of, over=over, rows=tile_rows(head.vocabulary))
    if mean:
        count = (target != ignore_index).sum()
        # Two steps, because the gradient of 0 / 0 would be nan.
        total = total / count.clamp(min=1) + torch.where(count == 0, torch.nan, 0.0)
    return total.to(dtype)


def tiled_sum(
    head: Linear, loss_of: Callable[[torch.Tensor, slice], torch.Tensor], *, over: Callable[[], None], rows: int
) -> torch.Tensor:
    """The sum of `loss_of(product, rows)` over tiles of `rows` rows of `head.hidden` (N, D), 0D, fp32 or wider.

    `product`: (R, V), without the head's element-wise operations; what `loss_of` does to it is differentiated at once. `over`
    is called when backward passes through.
    """
    job = _Job(loss_of, torch.is_grad_enabled(), over, rows)
    total: torch.Tensor = _TiledSum.apply(head.hidden, head.weight, head.bias, job)
    return total


def saves_memory(num_rows: int, vocabulary: int, width: int, itemsize: int, *, learns: bool) -> bool:
    """Whether all logits with their gradient are larger than a tile plus the head's fp32 gradient, which only tiles need.

    `learns`: whether the head (vocabulary x width) gets a gradient. `itemsize`: bytes of a logit.
    """
    learned = 4 * vocabulary * width if learns else 0
    return num_rows * vocabulary * itemsize * 2 > TILE_BYTES + learned


class _TiledSum(torch.autograd.Function):
    """The sum of all rows' losses, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: _Job
    ) -> torch.Tensor:
        """Compute the loss and, if needed, the gradients for an incoming gradient of 1."""
        wanted = [job.learns and needed for needed in ctx.needs_input_grad[:3]]
        grads = _Gradients(hidden, weight, bias, wanted)
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        rows = job.rows
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            product = functional.linear(part, weight, bias)
            with torch.set_grad_enabled(any(wanted)):
                product.requires_grad_(any(wanted))
                loss = job.loss_of(product, slice(start, start + rows))
            total += loss.detach()
            if any(wanted):
                (grad,) = torch.autograd.grad(loss, product)
                del product, loss
                grads.add(start, part, weight, grad)
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.over = job.over
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that forward computed. May run twice (a retained graph, a backward in parts)."""
        refuse_second_derivatives('a loss in tiles. Set "hf_dist": {"tiled_loss": false}')
        ctx.over()
        scaled = (
            None if sums is None else torch.mul(sums, grad, out=torch.empty_like(sums, dtype=dtype))
            for sums, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None


class _Gradients:
    """Gradient sums over tiles in fp32; only the scaled result is rounded to a half dtype, as in the plain computation."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: list[bool]
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden, dtype=wide) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None

    def add(self, start: int, part: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Add one tile: `grad` (R, V) is the gradient of its logits, `part` (R, D) are its hidden states."""
        if self.hidden is not None:
            self.hidden[start : start + len(part)] = _wide_product(grad, weight)
        if self.weight is not None:
            # Multiply by parts of the vocabulary, to avoid a second tensor of the head's size.
            step = max(1, TILE_BYTES // (4 * part.shape[1]))
            for at in range(0, len(self.weight), step):
                self.weight[at : at + step] += _wide_product(grad[:, at : at + step].t(), part)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in fp32 or wider, never rounded to a half dtype."""
    if a.dtype.itemsize >= 4:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
