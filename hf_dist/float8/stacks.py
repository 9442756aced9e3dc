"""Stacked experts that multiply in float8, by torchao's grouped products. torchao has them with scales of rows only.

The experts' own forward (transformers' "grouped_mm") runs, and finds a `Float8Stack` in the place of each weight. Adapters on
experts (`parallel/experts/low_rank.py`) lie over it: their thin products stay in bf16.
Source: torchao 0.18, `prototype/moe_training/fp8_grouped_mm.py`; `float8/float8_linear.py` for one expert.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.float8.groups import PaddedGroups, padded_groups
from hf_dist.tensors.stacks import StackStandIn, in_place_of, is_grouped

__all__ = ["GroupedProduct", "become_float8_stack", "is_float8_stack", "matrices_of", "torchao_product", "why_plain"]

_PRODUCT = "float8_product"
"""Attribute of converted experts."""
_MARK = "_float8_of"
"""Attribute of their classes."""
_MODULE, _FUNCTION = "torchao.prototype.moe_training.fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm"
_UNPADDED = "pad_token_groups_for_grouped_mm"
"""Argument that says whether groups still have to be padded."""


def torchao_product() -> Callable[..., torch.Tensor] | None:
    """torchao's grouped product; None if the installed version has none, or one with other arguments. Local."""
    found: Any = None
    with suppress(ImportError):
        found = getattr(importlib.import_module(_MODULE), _FUNCTION, None)
    return found if found is not None and _UNPADDED in inspect.signature(found).parameters else None


@dataclass(frozen=True)
class GroupedProduct:
    """How stacks multiply: `A` (M, K), sorted by expert, by `B_t` (E, K, N), column-major."""

    recipe: Any
    """torchao's "rowwise" recipe, a `Float8LinearConfig`."""

    @functools.cached_property
    def mm_config(self) -> Any:
        """Its `LinearMMConfig`, as torchao's layer sets it."""
        linear: Any = importlib.import_module("torchao.float8.float8_linear")
        with torch.device("meta"):
            return linear.Float8Linear(16, 16, bias=False, config=self.recipe).linear_mm_config

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, padded: Callable[[], PaddedGroups]
    ) -> torch.Tensor:
        """(M, N): each group of `rows` by its expert's matrix; groups end at `ends`. Rows behind the last are undefined."""
        if rows.is_meta:  # a plan asks for shapes
            return rows @ weight[0]
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        return self._emulated(rows, weight, ends) if self.recipe.emulate else self._grouped(rows, weight, padded())

    @staticmethod
    def _grouped(rows: torch.Tensor, weight: torch.Tensor, groups: PaddedGroups) -> torch.Tensor:
        product = torchao_product()
        assert product is not None
        out_dtype = torch.bfloat16  # the only one of the kernel
        wide = groups.spread(rows.to(out_dtype))
        out: torch.Tensor = product(wide, weight, groups.ends, out_dtype=out_dtype, **{_UNPADDED: False})
        return groups.gathered(out)

    def _emulated(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """One expert after the other, by torchao's function for a linear layer."""
        linear: Any = importlib.import_module("torchao.float8.float8_linear")
        product = linear.matmul_with_hp_or_float8_args.apply
        last = [0, *ends.tolist()]
        sizes = [end - start for start, end in itertools.pairwise(last)]
        *parts, behind = rows.split([*sizes, len(rows) - last[-1]])
        made = [
            # An empty group has no largest number, but its weight gets a gradient of zeros.
            product(part, matrix, self.mm_config, self.recipe) if len(part) else part @ matrix.to(part.dtype)
            for part, matrix in zip(parts, weight.unbind(0), strict=True)
        ]
        return torch.cat([*made, behind.new_zeros(len(behind), weight.shape[2])])


class Float8Stack(StackStandIn):
    """Weights (E, m, n) that grouped products take in float8, and everything else as they are."""

    def __init__(self, base: torch.Tensor, product: GroupedProduct, known: dict[Any, PaddedGroups]) -> None:
        """`known`: padded groups of this forward, which its products share."""
        self.base, self.product, self.known = base, product, known

    def __getitem__(self, index: Any) -> Any:
        return self.base[index]

    def over(self, base: torch.Tensor) -> Float8Stack:
        """The same of other weights."""
        return Float8Stack(base, self.product, self.known)

    def swapped(self) -> Float8Stack:
        """Each matrix transposed, as a view."""
        return self.over(self.base.transpose(-2, -1))

    def plain(self) -> torch.Tensor:
        """The weights."""
        weights: torch.Tensor = self.base
        return weights

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        given = {key: value for key, value in (kwargs or {}).items() if value is not None}
        ends = given.pop("offs", None)
        if is_grouped(func) and len(args) == 2 and isinstance(args[1], cls) and ends is not None and not given:
            rows, stack = args
            return stack.product(rows, stack.base, ends, lambda: stack._groups(ends, len(rows)))
        return super().__torch_function__(func, types, args, kwargs)

    def _groups(self, ends: torch.Tensor, rows: int) -> PaddedGroups:
        key = id(ends), rows  # the forward holds `ends` as long as this
        if key not in self.known:
            self.known[key] = padded_groups(ends, rows)
        return self.known[key]


# ---- modules of experts


def matrices_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Own parameters that are stacks of matrices of floats."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return {}
    return {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3 and p.is_floating_point()}


def why_plain(module: nn.Module) -> str | None:
    """Why the stacks of `module` cannot multiply in float8, whatever their sizes; None if they can. Local."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm" or not hasattr(module, "is_transposed"):
        return "whose implementation is not grouped_mm"
    return "in the layout (experts, in, out)" if module.is_transposed else None


def is_float8_stack(module: nn.Module) -> bool:
    """Whether `module` was converted."""
    return _MARK in vars(type(module))


def become_float8_stack(experts: Any, product: GroupedProduct) -> None:
    """Convert one module of experts in place: its class changes, and what its products are is set on it. Local."""
    kind: Any = type(experts)
    experts.__class__ = _class_of(kind)
    experts.__dict__[_PRODUCT] = product


@functools.cache
def _class_of(cls: Any) -> type[nn.Module]:
    @torch.compiler.disable  # the stand-ins are not tensors; compiled code calls this
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        known: dict[Any, PaddedGroups] = {}
        stacks: dict[str, StackStandIn] = {}
        for name in matrices_of(self):
            found = getattr(self, name)  # a stand-in with adapters, if there are some
            base = Float8Stack(found.base if isinstance(found, StackStandIn) else found, vars(self)[_PRODUCT], known)
            stacks[name] = found.over(base) if isinstance(found, StackStandIn) else base
        with in_place_of(self, stacks):
            return cls.forward(self, *args, **kwargs)

    # Keep the name: models look up classes by it.
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": __name__, _MARK: cls})
