"""Targets of the loss keep their dtype: regression targets do not fit into 8 bits of mantissa.

[Note: dtypes of inputs] A half-precision run has no autocast. Floating inputs (images, embeddings) are cast at the model's
entry, or the first layer would reject them. Targets are recognised by name (in the signature, the keywords and nested dicts)
and passed unchanged, so the loss is computed in their dtype, as under autocast. Most torch functions promote mixed dtypes
themselves. For those that reject them, `MixedDtypes` applies autocast's rules during this forward: code that runs with
half-precision targets must also run with fp32 targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["MixedDtypes", "cast_but_targets", "is_target"]

_WORDS = frozenset({"label", "labels", "target", "targets", "truth", "gt", "y"})
_NAMES = frozenset({"past_values", "future_values"})
"""Time series: the network itself normalises both, and the loss compares them."""

_TO_HALF = frozenset(
    {
        *(
            F.linear,
            F.bilinear,
            F.conv1d,
            F.conv2d,
            F.conv3d,
            F.conv_transpose1d,
            F.conv_transpose2d,
            F.conv_transpose3d,
        ),
        *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul),
        *(torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm, F.scaled_dot_product_attention),
    }
)
_TO_FLOAT = frozenset(
    {F.huber_loss, F.mse_loss, F.binary_cross_entropy, F.grid_sample, F.layer_norm, F.group_norm, torch.cdist}
)
"""`mse_loss` takes both from torch 2.13 on; before, its backward rejects them."""


def is_target(name: str) -> bool:
    """Whether an argument of this name is a target of the loss: `labels`, `mask_labels`, `target`, `y`, `future_values`, ..."""
    return name in _NAMES or not _WORDS.isdisjoint(name.lower().split("_"))


def cast_but_targets(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], dtype: torch.dtype
) -> tuple[object, bool]:
    """((args, kwargs) of `module` with all fp32 tensors except targets cast to `dtype`, whether there was an fp32 target)."""
    kept = False

    def cast(value: Any, as_given: bool) -> object:
        nonlocal kept
        if type(value) in (tuple, list):
            return type(value)(cast(item, as_given) for item in value)
        if type(value) is dict:
            return {key: cast(item, as_given or (type(key) is str and is_target(key))) for key, item in value.items()}
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        kept |= as_given
        return value if as_given else value.to(dtype)

    names = _names(module, len(args)) if args else []
    return (tuple(cast(a, is_target(n)) for a, n in zip(args, names, strict=True)), cast(dict(kwargs), False)), kept


def _names(module: nn.Module, count: int) -> list[str]:
    """Names of the first `count` positional arguments of the module's forward; "" for an argument without a name."""
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # built in C
        found = {}.values()
    names = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:count], *[""] * (count - len(names))]


class MixedDtypes(TorchFunctionMode):
    """Casts as autocast would for functions that reject a mix of fp32 and `half` tensors."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Torch's protocol."""
        given = (args, dict(kwargs or {}))
        to = self.half if func in _TO_HALF else torch.float32 if func in _TO_FLOAT else None
        if to is not None:
            dtypes = {t.dtype for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
            if {self.half, torch.float32} <= dtypes:
                given = tree_map(
                    lambda x: x.to(to) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, given
                )
        return func(*given[0], **given[1])
