"""Starts the sum of backward before weight gradients are computed (`tensor_parallel.tp_overlap_comm`).

q, k and v read one tensor, whose gradient is a sum over the ranks. By default autograd computes the input and weight
gradients of each product together, so the sum starts after the last product. Here backward computes only the gradient of the
input. The weight gradient is computed at a separate node, which autograd reaches after the sum has started:

    forward     wait(x) -> start(x, token of q, of k, of v) -> products
    backward    dx of v, of k, of q; start the sum; dW of v, of k, of q; wait for the sum

[Note: order of nodes] Among ready nodes autograd runs the one created last, so tokens are created after `wait`.

A pipeline that splits a backward (`parallel/pipeline/backward.py`) runs `start` a second time, for the tokens alone. Only
they lead to the weights, so that weight gradients are deferred, and nothing is summed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_dist.parallel.tensor.peers import Peers, Started
from hf_dist.tensors.linear_input import LinearInput

__all__ = ["Crossed", "crossed_early", "splits_backward"]

Enter = Callable[[Peers, torch.Tensor, torch.Size, int], torch.Tensor]
Begin = Callable[[Peers, torch.Tensor, torch.Size, int], Started]
Weights = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


def splits_backward(module: nn.Module) -> bool:
    """Whether this module's product can be split this way: a plain trainable linear layer without adapters."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight.requires_grad


class _Due:
    """The inputs of one product's weight gradient, kept from its backward until its token's."""

    def __init__(self) -> None:
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []


class _Sum:
    """The sum of one crossing, from its start to the node that waits for it."""

    def __init__(self, peers: Peers, begin: Begin, enter: Enter, extra: int) -> None:
        self.peers, self.begin, self.enter, self.extra = peers, begin, enter, extra
        self.started: Started | None = None


class Crossed:
    """An activation inside a region, and the products that read it."""

    def __init__(self, tensor: torch.Tensor, due: Mapping[int, _Due] | None = None) -> None:
        self.tensor = tensor
        self._due = due or {}

    def entering(self, module: nn.Module | None) -> torch.Tensor:
        """The tensor as the input of `module`. If `module` is one of the products, it is computed here."""
        due = self._due.get(id(module))
        if due is None or torch.is_autocast_enabled(self.tensor.device.type):
            return self.tensor

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out: torch.Tensor = _Product.apply(x, lambda: (weight, bias), due)
            return out

        return LinearInput.of(self.tensor, product)


def crossed_early(
    tensor: torch.Tensor, peers: Peers, enter: Enter, begin: Begin, extra: int, products: Sequence[nn.Module]
) -> Crossed:
    """`tensor` across a crossing that is `enter` in forward, and in backward a sum that `begin` starts.

    `products`: the products that will read it. One that does not read it costs nothing.
    """
    total = _Sum(peers, begin, enter, extra)
    waiting = _Wait.apply(tensor, total)
    due = {id(product): _Due() for product in products}
    tokens = [_Token.apply(p._parameters["weight"], p._parameters["bias"], due[id(p)]) for p in products]
    return Crossed(_Start.apply(waiting, total, *tokens), due)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started, ctx.total.started = ctx.total.started, None
        if started is not None:
            started.wait()
        return grad, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, total: _Sum, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.total, ctx.shape, ctx.tokens = total, tensor.shape, tokens
        entered = total.enter(total.peers, tensor, tensor.shape, total.extra)
        return entered.clone() if entered._is_view() and entered._base is not tensor._base else entered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, (waiting, _) = ctx.total, ctx.next_functions[0]
        summed = None
        if waiting is not None and torch._C._will_engine_execute_node(waiting):
            total.started = total.begin(total.peers, grad, ctx.shape, total.extra)
            summed = total.started.tensor
        return (summed, None, *(token.new_zeros(0) for token in ctx.tokens))


class _Token(torch.autograd.Function):
    """Stands for a weight where the sum starts, so that its gradient is computed once the sum has started."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, due: _Due) -> torch.Tensor:
        ctx.due = due
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts, ctx.due.parts = ctx.due.parts, []
        weight = bias = None
        for grad, x in parts:
            grad = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                own = grad.t() @ x.reshape(-1, x.shape[-1])
                weight = own if weight is None else weight + own
            if ctx.needs_input_grad[1]:
                bias = grad.sum(0) if bias is None else bias + grad.sum(0)
        return weight, bias, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: Weights, due: _Due) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.due = weights, due  # no arguments: the product does not lead to them
        return functional.linear(x, *weights())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.due.parts.append((grad, x))
        weight, _ = ctx.weights()
        return (grad.reshape(-1, grad.shape[-1]) @ weight).view(x.shape), None, None
