"""The whole weight of a head over a split vocabulary, for code that reads it instead of calling the head.

Fused losses (TRL's trainers, Liger's kernels) multiply the hidden states by `lm_head.weight` themselves. A rank has only some
rows of it, so the loss would be finite and plausible, but over another vocabulary. Such a read is invisible where it
computes (an autograd Function), so it is caught where it asks the head for its weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from hf_dist.log import say_once
from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.peers import Peers

__all__ = ["WholeHead"]

_READER = "_hf_dist_reader"


class WholeHead:
    """Gathers the parameters of one head for code that reads them inside the model's forward but outside the head's own."""

    def __init__(
        self, model: nn.Module, head: nn.Module, peers: Peers, width: int, is_whole: Callable[[], bool]
    ) -> None:
        """`width`: rows over all ranks; `is_whole`: whether the parameters are temporarily whole."""
        self.peers, self.width, self.is_whole = peers, width, is_whole
        self._name = type(model).__name__
        self._depth = 0  # running forwards of the model
        self._calls = 0  # running calls of the head
        self._gathered: dict[tuple[str, bool], torch.Tensor] = {}
        kind: type = type(head)
        head.__class__ = _asks_its_reader(kind)
        mine = weakref.ref(self)  # weak: a copy of the model must not copy groups
        head.__dict__[_READER] = lambda name, param: param if (own := mine()) is None else own.read(name, param)
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        head.register_forward_pre_hook(self._begin, prepend=True)
        head.register_forward_hook(self._end, always_call=True)

    def read(self, name: str, param: nn.Parameter) -> torch.Tensor:
        """The value of `head.weight` or `head.bias`. Collective over the ranks of the split if it is gathered."""
        if not self._depth or self._calls or self.is_whole():
            return param
        key = name, torch.is_grad_enabled()
        if key not in self._gathered:
            say_once(
                f"tensor_parallel: a loss of its own reads lm_head.{name} of {self._name}, so it is gathered from the ranks in "
                "each forward; the model's own loss leaves it cut"
            )
            self._gathered[key] = tp_collectives.whole_rows(param, self.peers, self.width)
        return self._gathered[key]

    def _enter(self, model: nn.Module, args: object) -> None:
        self._depth += 1

    def _leave(self, model: nn.Module, args: object, output: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            self._gathered.clear()

    def _begin(self, head: nn.Module, args: object) -> None:
        self._calls += 1

    def _end(self, head: nn.Module, args: object, output: object) -> None:
        self._calls = max(self._calls - 1, 0)


@functools.cache
def _asks_its_reader(cls: type) -> type:
    """A twin of a module's class whose `weight` and `bias` come from its reader."""

    def asked(name: str) -> property:
        def get(module: nn.Module) -> object:
            param, reader = module._parameters[name], module.__dict__.get(_READER)
            return param if param is None or reader is None else reader(name, param)

        return property(get)

    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "weight": asked("weight"),
        "bias": asked("bias"),
    }
    twin: type = type(cls)(cls.__name__, (cls,), body)
    return twin
