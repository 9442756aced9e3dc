"""LoRA on stacked experts without the merged stack: x W^T + (x A^T) B^T instead of x (W + B A)^T.

PEFT adds the adapters of all experts to the whole stack in every forward (`ParamWrapper`) and keeps the sum for backward.
Here the forward of the experts finds a `LowRankStack` instead of the weight. For the products that experts consist of
(grouped, of one expert, of experts by index) it adds two thin products; for anything else it returns the merged weight, so
results stay correct. The class's own forward runs, with all its flags. Source: peft 0.21, `tuners/lora/layer.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist.sharding.param_slice import held_slice
from hf_dist.tensors.stacks import StackStandIn, in_place_of, is_grouped

__all__ = ["LowRankStack", "keep_adapters_low_rank"]

_ALIGNMENT = 16
"""Alignment of rows that grouped products need, in bytes."""
_PRODUCTS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
    torch.mm,
    torch.Tensor.mm,
)


class LowRankStack(StackStandIn):
    """`base + left @ right`, never summed: weights of all or some experts, (..., m, n)."""

    def __init__(self, base: Any, left: torch.Tensor, right: torch.Tensor) -> None:
        """`base`: (..., m, n), or a stand-in for it; `left`: (..., m, r); `right`: (..., r, n), all in one dtype."""
        self.base, self.left, self.right = base, left, right

    def __getitem__(self, index: Any) -> LowRankStack | torch.Tensor:
        if isinstance(index, tuple):  # a part of a matrix
            return self.plain()[index]
        return LowRankStack(self.base[index], self.left[index], self.right[index])

    def over(self, base: Any) -> LowRankStack:
        """The same adapters over another `base`."""
        return LowRankStack(base, self.left, self.right)

    def swapped(self) -> LowRankStack:
        """Each matrix transposed; nothing is multiplied out."""
        return LowRankStack(*(t.transpose(-2, -1) for t in (self.base, self.right, self.left)))

    def plain(self) -> torch.Tensor:
        """The weights as PEFT computes them."""
        base: torch.Tensor = self.base.plain() if isinstance(self.base, StackStandIn) else self.base
        return base + self.left @ self.right

    def __rmatmul__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.base + (rows @ self.left) @ self.right

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        given = {key: value for key, value in (kwargs or {}).items() if value is not None}
        low = [isinstance(arg, LowRankStack) for arg in args]
        if low[:2] == [False, True]:
            rows, weight = args[0], args[1]
            if is_grouped(func) and len(args) == 2 and given.keys() <= {"offs"}:
                return func(rows, weight.base, **given) + _thin(func, rows, weight, given)
            if func is torch.nn.functional.linear:
                thin = func(func(rows, weight.right), weight.left)
                return func(rows, weight.base, *args[2:], **given) + thin
            if func in _PRODUCTS and len(args) == 2 and not given:
                return func(rows, weight.base) + func(func(rows, weight.left), weight.right)
        if low == [True, False] and func in _PRODUCTS and not given:
            weight, rows = args
            return func(weight.base, rows) + func(weight.left, func(weight.right, rows))
        return super().__torch_function__(func, types, args, kwargs)


def _thin(product: Callable[..., torch.Tensor], rows: torch.Tensor, weight: LowRankStack, kwargs: Any) -> torch.Tensor:
    """The adapters' part of a grouped product, whose kernels need aligned rows."""
    left, right = weight.left, weight.right
    missing = -left.shape[-1] % (_ALIGNMENT // left.element_size())
    if missing:
        left = torch.nn.functional.pad(left, (0, missing))
        right = torch.nn.functional.pad(right, (0, 0, 0, missing))
    return product(product(rows, left.contiguous(), **kwargs), right.contiguous(), **kwargs)


# ---- PEFT's wrappers


def keep_adapters_low_rank(model: nn.Module) -> int:
    """Make PEFT's adapters on stacked experts of `model` work in low rank. Returns the number of such stacks. Local.

    Outside of a forward (merge, save, switch) PEFT's own code runs.
    """
    if "peft" not in sys.modules:
        return 0
    from_peft: object = sys.modules.get("peft.tuners.lora.layer")
    wrapper = getattr(from_peft, "ParamWrapper", None)
    if wrapper is None:
        return 0
    found = [module for module in model.modules() if isinstance(module, wrapper)]
    inner = {id(module.base_layer) for module in found}
    for module in found:
        if id(module) not in inner:
            module.__dict__["forward"] = _Forward(module)
    return sum(module.num_experts > 1 for module in found)


class _Forward:
    """Replaces `forward` of the outermost wrapper of a module, which it holds weakly; also in a copy of the module."""

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(memo[id(self._wrapper())])

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _forward(self._wrapper(), *args, **kwargs)


def _forward(wrapper: Any, *args: object, **kwargs: object) -> object:
    chain = [wrapper]
    while isinstance(chain[-1].base_layer, type(wrapper)):
        chain.append(chain[-1].base_layer)
    if kwargs.get("adapter_names") is not None or any(w.disable_adapters or w.merged for w in chain):
        return type(wrapper).forward(wrapper, *args, **kwargs)
    experts = chain[-1].base_layer
    stacks: dict[str, LowRankStack] = {}
    for layer in chain:
        if not _is_stack(layer) or layer.parameter_name in stacks:
            return type(wrapper).forward(wrapper, *args, **kwargs)
        stack = _stack_of(layer)
        if stack is not None:
            stacks[layer.parameter_name] = stack
    with in_place_of(experts, stacks):
        return experts(*args, **kwargs)


def _is_stack(layer: Any) -> bool:
    param = layer.get_param()
    return layer.num_experts > 1 and param.dim() == 3 and param.is_floating_point() and param.element_size() > 1


def _stack_of(layer: Any) -> LowRankStack | None:
    """The weight with all active adapters side by side; None without active adapters."""
    param = layer.get_param()
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if not adapters:
        return None
    held = held_slice(param).ranges[0]  # range of experts; their adapters are whole on every rank
    factors = [layer.get_delta_factors(name) for name in adapters]
    left = torch.cat([left * scaling for left, _, scaling in factors], dim=-1)
    right = torch.cat([right for _, right, _ in factors], dim=-2)
    if held != ((0, len(left)),):
        left, right = (torch.cat([t[first:last] for first, last in held]) for t in (left, right))
    return LowRankStack(param, left, right)
