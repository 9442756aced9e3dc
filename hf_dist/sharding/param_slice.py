"""Which slice of its stored parameter an `nn.Parameter` holds.

A parameter may be cut before it is sharded: the object and its name stay, its shape becomes the slice's shape. Layouts record
the slice (`ParamSlot.held`), and all code that reads or writes files uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dist.sharding.guard import LAZY
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["HELD", "cut_along", "forget_slice", "held_slice", "keep_slice", "mark_cut"]

HELD = "_hf_dist_held"
_ALONG = "_hf_dist_cut_along"


def held_slice(tensor: torch.Tensor) -> TensorSlice:
    """The slice of the stored parameter (or buffer) that `tensor` holds: all of it unless it was cut. Local, at any time."""
    held: TensorSlice | None = getattr(tensor, HELD, None)
    return TensorSlice.all(tensor.shape) if held is None else held


def cut_along(param: nn.Parameter) -> str:
    """The axis whose ranks hold the other slices of the stored parameter; empty if every rank holds all of it."""
    along: str = getattr(param, _ALONG, "")
    return along


def mark_cut(param: nn.Parameter, like: nn.Parameter) -> None:
    """Mark `param` as the same slice as `like`, whose shape it has (a copy without memory, say). Local."""
    for name in (HELD, _ALONG):
        if hasattr(like, name):
            setattr(param, name, getattr(like, name))


def keep_slice(param: nn.Parameter, held: TensorSlice, along: str = "") -> None:
    """Cut `param` to `held` in place, before the model is sharded. Local; a lazy parameter is not read.

    `along`: the axis (`dist/axes.py`) whose ranks hold the other slices.
    """
    assert tuple(param.shape) == held.whole, (param.shape, held)
    lazy: Any = getattr(param, LAZY, None)
    if lazy is not None:
        lazy.cut(param, held)
    else:
        param.data = held.take(param.data)
    setattr(param, HELD, held)
    setattr(param, _ALONG, along)


def forget_slice(param: nn.Parameter) -> None:
    """Mark `param` as all of its stored parameter again. Local."""
    for name in (HELD, _ALONG):
        if hasattr(param, name):
            delattr(param, name)
