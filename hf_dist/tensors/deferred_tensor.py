"""Tensors with a shape, a dtype and a place in the autograd graph, but without memory until they are read.

Two kinds: deferred logits (`memory/loss/lazy_logits.py`), and outputs of which a rank has a part
(`parallel/sequence/outputs.py`). And the refusal of second derivatives, by backwards that work on tensors without a history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hf_dist.errors import ModelError


def unread(shape: tuple[int, ...], dtype: torch.dtype, refusal: str, *sources: torch.Tensor | None) -> torch.Tensor:
    """A tensor of one element, expanded to `shape`; it requires grad if one of its `sources` does.

    `refusal`: text of the `ModelError` that a backward through this tensor raises. That happens if the tensor enters a custom
    autograd Function, which bypasses `__torch_function__`.
    """
    result: torch.Tensor = _Unread.apply(shape, dtype, refusal, *sources)
    return result


def refuse_second_derivatives(through: str) -> None:
    """Call it in a backward: raises `ModelError` if its result shall be differentiated again, which would silently be zero.

    `through`: what has no second derivative, and a sentence with the fix. Local.
    """
    if torch.is_grad_enabled():
        raise ModelError(
            "create_graph=True (gradient penalties, meta learning): second derivatives cannot go through "
            f"{through}, or compute this loss on a copy of the model that is not prepared."
        )


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, refusal: str, *sources: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.refusal = refusal
        device = next(t.device for t in sources if t is not None)
        return torch.empty((), dtype=dtype, device=device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> object:
        raise ModelError(ctx.refusal)


def _metadata() -> frozenset[object]:
    tensor: object = torch.Tensor
    attributes = "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta itemsize nbytes"
    methods = "size dim numel nelement is_floating_point element_size get_device __len__ __hash__ register_hook"
    found = {getattr(tensor, name).__get__ for name in attributes.split()}
    return frozenset(found | {getattr(tensor, name) for name in methods.split()} | {torch.is_floating_point})


_METADATA = _metadata()
"""Functions of a tensor that read no elements."""


class UnreadTensor(torch.Tensor):
    """Answers what needs no element by itself, and everything else with the tensor that it stands for."""

    def read_by(self, function: Callable[..., object]) -> torch.Tensor:
        """The plain tensor, for a function that needs its elements."""
        raise NotImplementedError

    @classmethod
    def unread_result(cls, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """What a function gives without a look at the elements; NotImplemented where it has to look."""
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = cls.unread_result(func, args, kwargs)
        if result is not NotImplemented:
            return result

        def read(value: object) -> object:
            return value.read_by(func) if isinstance(value, UnreadTensor) else value

        args, kwargs = tree_map(read, (args, kwargs))
        return func(*args, **kwargs)
