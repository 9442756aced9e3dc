"""The product of a linear layer in float8, forward and backward, of torchao's casts and its tensors.

    forward                  y  = x  w^T     x by rows, w by its outputs
    gradient of the input    dx = dy w       dy by rows, w by its inputs
    gradient of the weight   dw = dy^T x     dy and x by columns

torchao's own function computes both gradients whenever it is asked for one, and keeps the input even of a frozen weight. Here
each is computed where autograd wants it: below adapters, and in pipelines that split a backward. The numbers are the same.

Source: torchao `float8/float8_linear.py` (matmul_with_hp_or_float8_args).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["prepare_product", "product", "weight_casts"]

_functions: list[Any] = []
"""The autograd function; made once, by `prepare_product`: torch's compiler is long to import, and must find it made."""


def product(layer: Any, x: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
    """`x` (..., in) times `weight_t` (in, out) by the recipe of a converted `layer`, with its `kept` casts, if any."""
    kept = layer.kept
    made: torch.Tensor = _functions[0].apply(
        x, weight_t, kept.forward, kept.backward, layer.linear_mm_config, layer.config
    )
    return made


def weight_casts(weight_t: torch.Tensor, recipe: Any, mm_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight_t` (in, out) in eight bits: for the forward, and for the input's gradient; one where one scale serves both.

    `recipe`, `mm_config`: torchao's, of a converted layer.
    """
    forward, backward = recipe.cast_config_weight, recipe.cast_config_weight_for_grad_input
    first = _cast(weight_t, forward, 0, "WEIGHT", mm_config)
    if forward == backward and not _by_rows(forward):
        return first, first
    return first, _cast(weight_t, backward, -1, "WEIGHT", mm_config)


def _by_rows(how: Any) -> bool:
    return bool(how.scaling_granularity is importlib.import_module("torchao.float8.config").ScalingGranularity.AXISWISE)


def _cast(tensor: torch.Tensor, how: Any, axis: int, role: str, mm_config: Any) -> torch.Tensor:
    """`tensor` as the recipe wants a factor of this `role`; `axis`: along which elements share a scale, if not all do."""
    types = importlib.import_module("torchao.float8.config")
    if how.scaling_type is types.ScalingType.DISABLED:
        return tensor
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    made: torch.Tensor = importlib.import_module("torchao.float8.float8_scaling_utils").hp_tensor_to_float8_dynamic(
        tensor,
        how.target_dtype,
        mm_config,
        gemm_input_role=getattr(tensors.GemmInputRole, role),
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=axis if _by_rows(how) else None,
        round_scales_to_power_of_2=True,
    )
    return made


def _is_wanted(ctx: Any, number: int) -> bool:
    """Whether this run of autograd needs the gradient of input `number`: one for other inputs (zero bubble) need not."""
    if not ctx.needs_input_grad[number]:
        return False
    node = ctx.next_functions[number][0]
    # Autograd does not answer for a leaf; that of a weight is behind its view.
    return node.name().endswith("AccumulateGrad") or torch._C._will_engine_execute_node(node)


def prepare_product() -> None:
    """Make the autograd function, before a layer runs. Local."""
    if _functions:
        return

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight_t: torch.Tensor, first: Any, second: Any, mm_config: Any, recipe: Any
        ) -> torch.Tensor:
            of_input, of_weight, *_ = ctx.needs_input_grad
            ctx.save_for_backward(x if of_weight else None, weight_t if of_input and second is None else None)
            ctx.second, ctx.mm_config, ctx.recipe = second, mm_config, recipe
            rows = _cast(x, recipe.cast_config_input, -1, "INPUT", mm_config)
            if first is None:
                first = _cast(weight_t, recipe.cast_config_weight, 0, "WEIGHT", mm_config)
            return torch.mm(rows.reshape(-1, x.shape[-1]), first).reshape(*x.shape[:-1], weight_t.shape[-1])

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, weight_t = ctx.saved_tensors
            recipe, mm_config, flat = ctx.recipe, ctx.mm_config, grad.reshape(-1, grad.shape[-1])
            of_input = of_weight = None
            if _is_wanted(ctx, 0):
                rows = _cast(flat, recipe.cast_config_grad_output, -1, "GRAD_OUTPUT", mm_config)
                factor = ctx.second
                if factor is None:
                    factor = _cast(weight_t, recipe.cast_config_weight_for_grad_input, -1, "WEIGHT", mm_config)
                of_input = torch.mm(rows, factor.t()).reshape(*grad.shape[:-1], factor.shape[0])
            if _is_wanted(ctx, 1):
                columns = _cast(flat, recipe.cast_config_grad_output_for_grad_weight, 0, "GRAD_OUTPUT", mm_config)
                inputs = x.reshape(-1, x.shape[-1])
                inputs = _cast(inputs, recipe.cast_config_input_for_grad_weight, 0, "INPUT", mm_config)
                of_weight = torch.mm(columns.t(), inputs).t()
            return of_input, of_weight, None, None, None, None

    _functions.append(torch._dynamo.allow_in_graph(Product))
