"""Tensors with a shape, a dtype and a place in the autograd graph, but without memory until they are read.

Subclasses compute the real tensor for every function that is not in `METADATA` (`loss/lazy_logits.py`: deferred logits;
`sequence/outputs.py`: outputs of which a rank has a part).
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.errors import ModelError


def unread(shape: tuple[int, ...], dtype: torch.dtype, refusal: str, *sources: torch.Tensor | None) -> torch.Tensor:
    """A tensor of one element, expanded to `shape`; it requires grad if one of its `sources` does.

    `refusal`: text of the `ModelError` that a backward through this tensor raises. That happens if the tensor enters a custom
    autograd Function, which bypasses `__torch_function__`.
    """
    result: torch.Tensor = _Unread.apply(shape, dtype, refusal, *sources)
    return result


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, refusal: str, *sources: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.refusal = refusal
        device = next(t.device for t in sources if t is not None)
        return torch.empty((), dtype=dtype, device=device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ModelError(ctx.refusal)


def _metadata() -> frozenset[Any]:
    tensor: Any = torch.Tensor
    attributes = "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta itemsize nbytes"
    methods = "size dim numel nelement is_floating_point element_size get_device __len__ __hash__ register_hook"
    found = {getattr(tensor, name).__get__ for name in attributes.split()}
    return frozenset(found | {getattr(tensor, name) for name in methods.split()} | {torch.is_floating_point})


METADATA = _metadata()
"""Functions of a tensor that read no elements."""
