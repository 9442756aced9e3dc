"""Tensors inside the inputs and outputs of a module: plain containers, HF's `ModelOutput`, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def differentiable(value: object) -> list[torch.Tensor]:
    """Tensors that require grad in plain containers and HF's `ModelOutput` (a mapping), without duplicates."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []  # caches and other objects keep their identity: a copy of a KV cache would lose its updates
    found = {id(t): t for item in value for t in differentiable(item)}
    return list(found.values())


def inside_object(value: object) -> list[torch.Tensor]:
    """Tensors that require grad among the attributes of a non-container object, such as a dataclass."""
    return [] if isinstance(value, (torch.Tensor, nn.Module)) else differentiable(getattr(value, "__dict__", None))


def in_fp32(value: Any) -> object:
    """`value` with half-precision tensors cast to fp32, as accelerate does to a model's outputs under autocast; see
    `accelerate.utils.operations.convert_to_fp32`. HF's `ModelOutput` is changed in place; caches are left alone."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if type(value) in (tuple, list):
        return type(value)(in_fp32(item) for item in value)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = in_fp32(value[key])
    return value


def map_plain(fn: Callable[[Any], object], value: Any) -> object:
    """Apply `fn` to the leaves of tuples, lists and dicts. Any other object is a leaf."""
    if type(value) in (tuple, list):
        return type(value)([map_plain(fn, item) for item in value])
    if type(value) is dict:
        return {key: map_plain(fn, item) for key, item in value.items()}
    return fn(value)


def differentiable_leaves(value: object) -> tuple[list[torch.Tensor], bool]:
    """(tensors that require grad among the leaves that `map_plain` reaches, whether other leaves hold some, too)."""
    leaves: list[Any] = []
    map_plain(leaves.append, value)
    found = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}
    hidden = any(differentiable(v) or inside_object(v) for v in leaves if not isinstance(v, torch.Tensor))
    return list(found.values()), hidden
